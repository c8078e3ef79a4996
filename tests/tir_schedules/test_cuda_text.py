"""The CUDA text of attention kernels, run on the host, against float64; and what is not borne."""

import re

import numpy as np
import pytest
from attention_cuda_runs import TARGET, assert_close, inputs, kernel, run, symbolic_types
from attention_runs import static_types
from cuda_text import CudaText, CudaTextError
from test_attention_cuda import CASES, SHAPES

QUICK = {"causal", "half bias", "single, 33 and 5", "D = 80"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in CASES]
)
def test_equals_float64_at_symbolic_shapes(name, rng):
    form, attributes = CASES[name]
    compiled = CudaText(kernel(symbolic_types(**form), **attributes), TARGET)
    for shape in SHAPES:
        arrays = inputs(rng, shape, **form)
        assert_close(run(compiled, arrays), arrays, **attributes)


def test_equals_float64_at_constant_shapes_in_any_order_of_warps(rng):
    arrays = inputs(rng, (1, 1, 300), heads=(8, 1), width=64)
    func = kernel(static_types(arrays))
    outs = [run(CudaText(func, TARGET, seed=seed), arrays) for seed in range(3)]
    assert_close(outs[0], arrays)
    assert (outs[0] == outs[1]).all()
    assert (outs[0] == outs[2]).all()


# Faults in the text


def replaced(text, pattern, by, number=0):
    """The text with the given match of a pattern replaced."""
    match = list(re.finditer(pattern, text))[number]
    return text[: match.start()] + match.expand(by) + text[match.end() :]


MMA = r"(mma_\w+\((?:\S+ ){4})(\S+) (\S+) (\S+ \S+) (\S+) (\S+ )"
WRONG_NUMBERS = {
    "rows of the left factor": (MMA, r"\1\3 \2 \4 \5 \6", 1),
    "halves of the right factor": (MMA, r"\1\2 \3 \4 \6\5 ", 1),
    "operands of the instruction": (r"\{%8, %9\}", "{%9, %8}"),
    "not transposed": (r"x4\.trans\.shared", "x4.shared"),
    "pair": (r"x2\.f32 %0, %1, %2", "x2.f32 %0, %2, %1"),
    "lane of a shuffle": (r"(shfl_xor_sync\(.*), 2, 32", r"\1, 4, 32", -1),
    "lane of a matrix": (r"(x4_shared_b16\(_.*) & 15", r"\1 & 7"),
    "register that nothing was written to": (r"_ptr_4\[0\] = 0.*;", ""),
}
WAIT, BARRIER = r"\w+wait_group_\d\(\);", r"__syncthreads\(\);"
NOT_BORNE = {
    "no wait": (WAIT, "", "before its copy is complete", 0),
    "no wait in the loop": (WAIT, "", "before its copy is complete", 2),
    "no barrier": (BARRIER, "", "without a barrier after", 0),
    "no barrier before keys are overwritten": (BARRIER, "", "overwritten while", 2),
    "no barrier before values are read": (BARRIER, "", "without a barrier after", 3),
    "no commit": (r"\n\s+\w+commit_group\(\);", "", "before its copy is complete", 0),
    "barrier of some lanes": (BARRIER, "if (threadIdx.x < 9) __syncthreads();", "apart", 0),
    "a lane that leaves": (BARRIER, r"if (threadIdx.x == 3) return; \g<0>", "apart", 2),
    "a warp that leaves": (BARRIER, r"if (threadIdx.y == 3) return; \g<0>", "apart", 2),
    "copy of rows that are not there": (r"\? 16 : 0", "? 16 : 16", "k: out of bounds", -1),
    "misaligned copy": (r"v_ptr\[", "v_ptr[4 + ", "v: misaligned", 0),
    "misaligned store": (r"out_ptr\[", "out_ptr[1 + ", "out: misaligned", 0),
    "store out of bounds": (r"out_ptr\[", "out_ptr[4096 + ", "out: out of bounds", 0),
    "beyond shared memory": (r"(trans_shared_b16\(_.*) \+ ", r"\1 + 9999 + ", "out of bounds", 0),
    "every block on the same rows": (r"blockIdx\.x", "0", "another thread writes", 1),
    "no store": (r"\w+st_global_b32\(\(.*;", "", "not written once", 0),
}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return inputs(rng, (1, 40, 140), heads=(4, 2), width=16)


@pytest.fixture(scope="module")
def whole(arrays):
    return CudaText(kernel(static_types(arrays), causal=99), TARGET)


def test_the_text_itself_passes(whole, arrays):
    assert_close(run(whole, arrays), arrays, causal=99)


@pytest.mark.parametrize("fault", WRONG_NUMBERS)
def test_wrong_numbers_are_seen(fault, whole, arrays):
    broken = whole.edited(lambda text: replaced(text, *WRONG_NUMBERS[fault]))
    out = run(broken, arrays)
    with pytest.raises(AssertionError):
        assert_close(out, arrays, causal=99)


@pytest.mark.parametrize("fault", NOT_BORNE)
def test_faults_that_a_gpu_may_hide_are_seen(fault, whole, arrays):
    pattern, by, message, number = NOT_BORNE[fault]
    broken = whole.edited(lambda text: replaced(text, pattern, by, number))
    with pytest.raises(CudaTextError, match=message):
        run(broken, arrays)

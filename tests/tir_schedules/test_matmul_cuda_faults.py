"""Faults planted in the CUDA text of INT4 products are seen when it runs on the host."""

import re

import numpy as np
import pytest
from cuda_text import CudaText, CudaTextError
from matmul_cuda_runs import (
    TARGET,
    activations,
    assert_close,
    layout_of,
    plain,
    run,
    scheduled,
    weight,
)

TILE = (1, 2, 2, 1, 2, 4, 3, 2)
"""Two warps along channels and two along k, two blocks along k."""

FLOATS = {
    "mask of low nibbles": (r"\(uint\)983056", "(uint)917520"),
    "exponent": (r"\(uint\)1677747200", "(uint)1677747201"),
    "registers of the left factor": (r"(\n +tvm\w+mma\w+\((?:\S+ ){4})(\S+) (\S+)", r"\1\3 \2"),
    "registers of the right factor": (r"(\n +tvm\w+mma\w+\((?:\S+ ){8})(\S+) (\S+)", r"\1\3 \2"),
    "a step that starts at one": (r"(\n +tvm\w+mma\w+\((?:\S+ ){10})0x0p\+0f", r"\g<1>0x1p+0f"),
    "byte of the zero point": (r"(\n +tvm\w+prmt_b32_rc8\((?:\S+ ){3})", r"\1 1 + "),
    "scale of the other channel": (r">> \(uint\)16\)", ">> (uint)0)"),
}


@pytest.fixture(scope="module")
def case():
    """A kernel, and arguments: W4A16 with groups and zero points, ragged."""
    rng = np.random.default_rng(5)
    layout = layout_of(72, 840, group_size=64, symmetric=False)
    compiled = CudaText(scheduled(plain(layout, 13), **{"9-16": TILE}), TARGET)
    arguments, x = activations(rng, 13, layout)
    return compiled, arguments, x, weight(rng, layout), layout


def edited(compiled, pattern, by, number=0):
    def edit(text):
        matches = list(re.finditer(pattern, text))
        assert matches, f"the text has no {pattern}"
        match = matches[number]
        return text[: match.start()] + match.expand(by) + text[match.end() :]

    return compiled.edited(edit)


def test_the_text_itself_passes(case):
    compiled, arguments, x, parts, layout = case
    assert_close(run(compiled, arguments, parts, layout), x, parts, layout)


@pytest.mark.parametrize("fault", FLOATS)
def test_wrong_numbers_are_seen(case, fault):
    compiled, arguments, x, parts, layout = case
    broken = edited(compiled, *FLOATS[fault])
    with pytest.raises(AssertionError, match="off by"):
        assert_close(run(broken, arguments, parts, layout), x, parts, layout)


NOT_BORNE = {
    "no wait": (r"\w+wait_group_1\(\);", "", "before its copy is complete"),
    "no barrier": (r"__syncthreads\(\);", "", "without a barrier|overwritten"),
    "no barrier before sums are read": (r"__syncthreads\(\);", "", "without a barrier", -1),
    "bytes behind the last": (r"\? 16 : 0", "? 16 : 16", "out of bounds", -1),
    "no commit": (r"\w+commit_group\w*\(\);", "", "before its copy is complete"),
}


@pytest.mark.parametrize("fault", NOT_BORNE)
def test_faults_that_a_gpu_may_hide_are_seen(case, fault):
    compiled, arguments, _, parts, layout = case
    pattern, by, message, *number = NOT_BORNE[fault]
    broken = edited(compiled, pattern, by, *number)
    with pytest.raises(CudaTextError, match=message):
        run(broken, arguments, parts, layout)

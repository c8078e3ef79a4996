"""The CUDA text of INT4 products with float32 activations, run on the host, against float64."""

import numpy as np
import pytest
from cuda_text import CudaText
from matmul_cuda_runs import TARGET, check, layout_of, plain, run, scheduled, weight
from test_matmul_cuda import ROWS

from sits_tvm import parse_target
from tir_schedules.int4_format.packing import unpack
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul

SHORT = 80, 327
"""n and k: rows of x are not 16 bytes apart, and the last pair of columns is half there."""


def formats():
    for group_size in (32, 64, 128, -1):
        for symmetric in (True, False):
            marks = () if (group_size, symmetric) == (64, False) else pytest.mark.slow
            yield pytest.param(group_size, symmetric, marks=marks)


@pytest.mark.parametrize(("group_size", "symmetric"), formats())
def test_one_function_serves_every_number_of_rows(group_size, symmetric):
    layout = layout_of(*SHORT, group_size=group_size, symmetric=symmetric)
    check(layout, ROWS, "float32")


@pytest.mark.parametrize(("k", "group_size"), [(1, 128), (17, 32), (33, -1), (546, -1)])
def test_columns_between_which_and_the_padded_ones_a_power_of_two_lies(k, group_size):
    """A channel of one group: sums of 15 k products need fewer bits than those of its padding."""
    check(layout_of(16, k, group_size=group_size), 2, "float32")


@pytest.mark.parametrize(("k", "group_size"), [(4, -1), (100, 32)])
def test_nothing_is_read_behind_the_last_column(k, group_size):
    """Rows of x are 16 bytes apart, those of its terms end 8 bytes further; padding of the weight
    is not zero where groups have zero points.
    """
    check(layout_of(16, k, group_size=group_size, symmetric=False), 3, "float32")


@pytest.mark.parametrize("group_size", [128, -1])
def test_values_that_float32_has_and_bfloat16_has_not(group_size):
    """What is beyond bfloat16, or would be before the scale; infinities, and every kind of NaN."""
    layout = layout_of(32, 256, group_size=group_size, symmetric=False)
    compiled = CudaText(scheduled(plain(layout, 12, "float32")), TARGET)
    rng = np.random.default_rng(0)
    parts = weight(rng, layout)
    x = rng.standard_normal((12, 256)).astype("float32")
    x[0, 3] = np.finfo("float32").max
    x[1] = np.copysign(1e37, x[1])
    x[2, 7], x[3, 8], x[4, 9] = np.inf, -np.inf, np.nan
    x[5, 9] = np.uint32(0x7F800001).view("float32")
    x[6, 9] = np.uint32(0xFF80FFFF).view("float32")
    x[7, 9:11] = np.inf, -np.inf
    x[8] *= np.float32(1e-30)
    x[9] = np.float32(1e-42)
    x[10] = 0
    got = run(compiled, [x], parts, layout, "float32")
    w = unpack(tuple(parts), layout).astype("float32")
    with np.errstate(all="ignore"):
        terms = x.astype("float64")[:, None, :] * w.astype("float64")
        want, magnitude = terms.sum(-1), np.abs(terms).sum(-1)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[2:4], want[2:4].astype("float32"))
    finite = np.isfinite(want)
    assert finite[[0, 1, 8, 9, 10, 11]].all()
    bound = 2e-6 * magnitude[finite] + 1e-35 * np.abs(w).sum(-1).max()
    assert (np.abs(got[finite] - want[finite]) <= bound).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_every_bucket_has_a_tile_that_fits(arch, group_size):
    func = plain(layout_of(4096, 4096, group_size=group_size), None, "float32")
    assert TensorCoreMatmul().apply(func, parse_target(f"cuda -arch={arch}"), False) is not None

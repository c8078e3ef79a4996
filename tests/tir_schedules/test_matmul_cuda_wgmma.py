"""INT4 products by warpgroups, for sm_90a: the CUDA text on the host, against float64."""

import re

import numpy as np
import pytest
from cuda_text import CudaText, CudaTextError
from matmul_cuda_runs import (
    activations,
    assert_close,
    check,
    layout_of,
    plain,
    run,
    scheduled,
    weight,
)

from sits_tvm import parse_target
from sits_tvm.diagnostics import SitsError

TARGET = parse_target("cuda -arch=sm_90a")
SLOW = pytest.mark.slow
TILES = {
    "17-32": (1, 4, 4, 1, 2, 2, 3, 2, 1),
    "33-64": (2, 8, 4, 1, 1, 2, 3, 1, 1),
    "257+": (1, 12, 8, 1, 1, 4, 2, 1, 1),
}
"""With two warps along k and two blocks, with two products side by side, with two warpgroups."""


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "group_size", "symmetric"),
    [(20, 334, "float16", 64, False), (45, 256, "bfloat16", -1, True)],
)
def test_float_activations(rows, k, dtype, group_size, symmetric):
    layout = layout_of(80, k, group_size=group_size, symmetric=symmetric)
    bucket = "17-32" if rows <= 32 else "33-64"
    check(layout, rows, dtype, target=TARGET, **{bucket: TILES[bucket]})


@pytest.mark.parametrize(("group_size", "symmetric"), [(128, True), (64, False)])
def test_int8_activations(group_size, symmetric):
    layout = layout_of(72, 388, "int8", group_size=group_size, symmetric=symmetric)
    check(layout, 19, target=TARGET, **{"17-32": TILES["17-32"]})


@SLOW
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
def test_one_function_serves_every_number_of_rows(form, symmetric, group_size):
    is_int8 = form == "int8"
    spec = {"group_size": group_size, "symmetric": symmetric}
    layout = layout_of(80, 328, "int8" if is_int8 else None, **spec)
    rows, dtype = (0, 1, 9, 17, 32, 33, 64, 65, 130, 257), "float16" if is_int8 else form
    check(layout, rows, dtype, target=TARGET, **TILES)


@SLOW
@pytest.mark.parametrize("scale_dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", [None, "int8"])
def test_float32_scales_and_ragged_pieces(activation, scale_dtype):
    """A row of 6 bytes, or of 4: pieces of activations are smaller than what is swizzled."""
    layout = layout_of(64, 516 if activation else 514, activation, scale_dtype=scale_dtype)
    check(layout, (18, 60), target=TARGET, **TILES)


_FENCE = r'asm volatile\("fence\.proxy\.async\.shared::cta;"[^;]*;'
FAULTS = {
    "no fence between proxies": (_FENCE, "", CudaTextError, "no fence.proxy.async"),
    "distance of eight rows": ("4611686293305294848", "4611686155866341376", AssertionError, "off"),
    "no swizzle": ("4611686293305294848", "274877906944", CudaTextError, "not swizzled"),
    "swizzle of copies": (r"\^", "&", (CudaTextError, AssertionError), ""),
    "start of shared memory": ("4294966272", "4294967232", AssertionError, "off"),
    "no wait": (r'asm volatile\("wgmma\.wait_group[^;]*;[^;]*;', "", CudaTextError, "product"),
    "no fence of registers": (
        r'asm volatile\("wgmma\.fence[^;]*;[^;]*;', "", CudaTextError, "no wgmma.fence"
    ),
    "no barrier": (r"__syncthreads\(\);", "", CudaTextError, "without a barrier|overwritten"),
}  # fmt: skip
QUICK = ("no fence between proxies", "distance of eight rows")


@pytest.fixture(scope="module")
def case():
    rng, layout = np.random.default_rng(3), layout_of(64, 384, group_size=128, symmetric=False)
    tiles = {"33-64": (1, 8, 4, 1, 1, 2, 2, 1, 1)}
    compiled = CudaText(scheduled(plain(layout, 40), TARGET, **tiles), TARGET)
    arguments, x = activations(rng, 40, layout)
    return compiled, arguments, x, weight(rng, layout), layout


def test_the_text_itself_passes(case):
    compiled, arguments, x, parts, layout = case
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16" in compiled.text
    assert_close(run(compiled, arguments, parts, layout), x, parts, layout)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=() if f in QUICK else SLOW) for f in FAULTS]
)
def test_faults_are_seen(fault, case):
    compiled, arguments, x, parts, layout = case
    pattern, by, error, message = FAULTS[fault]
    assert re.search(pattern, compiled.text)
    broken = compiled.edited(lambda text: re.sub(pattern, by, text, count=1 + (by != "")))
    with pytest.raises(error, match=message):
        assert_close(run(broken, arguments, parts, layout), x, parts, layout)


REFUSED = {
    "architecture": ("sm_90", TILES["33-64"], "wgmma=1; it takes"),
    "warps": ("sm_90a", (2, 8, 2, 1, 1, 2, 3, 1, 1), "4 warps along channels"),
    "warps along tokens": ("sm_90a", (2, 8, 4, 2, 1, 2, 3, 1, 1), "4 warps along channels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_there_is_no_kernel(name):
    arch, tile, message = REFUSED[name]
    func, target = plain(layout_of(64, 256, group_size=128), 64), parse_target(f"cuda -arch={arch}")
    with pytest.raises(SitsError, match=message):
        scheduled(func, target, **{"33-64": tile})


def test_says_which_pieces_of_a_row_it_takes():
    func = plain(layout_of(64, 256, "int8", group_size=64), 64)
    with pytest.raises(SitsError, match="units=1 are 64 bytes of a row, wgmma takes 128"):
        scheduled(func, TARGET, **{"33-64": (2, 8, 4, 1, 1, 1, 3, 1, 1)})

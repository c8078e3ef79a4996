"""Every tile that `tile_fault` lets through computes the right values, of any shape."""

from dataclasses import astuple

import numpy as np
import pytest
import tvm
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from matmul_cuda_runs import TARGET, check, layout_of, plain, scheduled

from sits_tvm import parse_target
from sits_tvm.device_code import record_launches
from sits_tvm.diagnostics import SitsError
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul, _recognise
from tir_schedules.matmul_cuda.spaces import tile_fault
from tir_schedules.matmul_cuda.tile import Tile

SHAPES = {
    "rows": st.integers(1, 70),
    "n": st.integers(1, 100),
    "k": st.integers(1, 300).map(lambda half: 2 * half),
    "group_size": st.sampled_from([32, 64, 128, -1]),
    "symmetric": st.booleans(),
    "activation": st.sampled_from([None, "int8"]),
    "scale_dtype": st.sampled_from(["float16", "float32"]),
    "tile": st.builds(
        Tile,
        channels=st.sampled_from([1, 2, 4]),
        tokens=st.sampled_from([1, 2, 4, 12]),
        warps_n=st.sampled_from([1, 2, 4]),
        warps_m=st.sampled_from([1, 2]),
        warps_k=st.sampled_from([1, 2, 4]),
        units=st.sampled_from([1, 2, 4, 8]),
        stages=st.sampled_from([2, 3, 5]),
        split=st.integers(1, 3),
    ),
}


def check_tile(rows, n, k, tile, seed, **spec):
    layout = layout_of(n, k, **spec)
    func = plain(layout, rows)
    _, operands = _recognise(func, TARGET)
    assume(tile_fault(operands, tile, TARGET) is None)
    (bucket,) = TensorCoreMatmul().spaces(func, TARGET)
    check(layout, rows, seed=seed, **{bucket: astuple(tile)})


SMALLEST = Tile(1, 1, 1, 1, 1, 1, 2)


@settings(max_examples=8, deadline=None)
@example(1, 1, 1, 66, -1, False, None, "float16", SMALLEST)  # more units than one group
@example(1, 1, 1, 64, 128, False, None, "float16", SMALLEST)  # a unit of padding alone
@given(seed=st.integers(0, 1 << 30), **SHAPES)
def test_any_tile_of_any_shape(
    seed, rows, n, k, group_size, symmetric, activation, scale_dtype, tile
):
    spec = {"group_size": group_size, "symmetric": symmetric, "scale_dtype": scale_dtype}
    check_tile(rows, n, k, tile, seed, activation=activation, **spec)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), **SHAPES)
def test_any_tile_of_any_shape_at_length(seed, **drawn):
    check_tile(seed=seed, **drawn)


FAULTS = {
    "group": ((1, 1, 1, 1, 1, 1, 3, 1), "units=1 are 64 columns, no multiple of the group size"),
    "shared memory": ((4, 8, 4, 2, 2, 8, 5, 1), "bytes of shared memory, more than"),
    "threads": ((1, 1, 4, 4, 4, 2, 2, 1), "64 warps are too many"),
    "split": ((1, 1, 1, 1, 1, 2, 2, 3), "split=3 leaves a block without work"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_says_why_there_is_no_kernel(name):
    tile, message = FAULTS[name]
    with pytest.raises(SitsError, match=f"rows 33-64 have no kernel: .*{message}"):
        scheduled(plain(layout_of(64, 256, group_size=128), 64), **{"33-64": tile})


def test_says_that_a_target_has_too_little_shared_memory():
    target = parse_target("cuda -arch=sm_80 -max_shared_memory_per_block=24576")
    func = plain(layout_of(4096, 4096, group_size=128), None)
    with pytest.raises(SitsError, match=r"bytes of shared memory, more than 24576[^$]*48 KiB"):
        TensorCoreMatmul().apply(func, target, False)


@pytest.mark.parametrize("n", [16, 256, 4096, 28672])
@pytest.mark.parametrize("k", [64, 640, 4096, 28672])
@pytest.mark.parametrize("activation", [None, "int8"])
def test_defaults_have_kernels(n, k, activation):
    for group_size in (32, 128, -1):
        for rows in (None, 1, 5, 16, 64, 256, 4096):
            func = plain(layout_of(n, k, activation, group_size=group_size), rows)
            _, operands = _recognise(func, TARGET)
            for space in TensorCoreMatmul().spaces(func, TARGET).values():
                assert tile_fault(operands, space.default, TARGET) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("activation", [None, "int8", "int4"])
def test_no_warp_is_without_rows(arch, activation):
    func = plain(layout_of(4096, 4096, activation, group_size=128), None)
    for space in TensorCoreMatmul().spaces(func, parse_target(f"cuda -arch={arch}")).values():
        if space.most is not None and space.default.warps_m > 1:
            assert space.default.block_tokens // 2 < space.most


def test_all_multiprocessors_work_on_one_row():
    for n, k in [(4096, 4096), (4096, 14336), (28672, 8192)]:
        func = plain(layout_of(n, k, group_size=128), 1)
        tile = TensorCoreMatmul().spaces(func, TARGET)["1"].default
        blocks = int(np.ceil(n / tile.block_channels)) * tile.split
        assert blocks >= 132
        in_flight = (tile.stages - 1) * tile.channel_tiles * tile.step_units * 512
        share = n * k // 2 // 132
        assert in_flight * -(-blocks // 132) >= min(40 << 10, share // 2)


@pytest.mark.parametrize("rows", [8, 16, 32, 64, 256])
def test_few_channels_are_cut_along_k_for_few_rows(rows):
    """132 multiprocessors, of which four may idle."""
    n = 1024 if rows > 64 else 4096
    func = plain(layout_of(n, 4096, group_size=128), rows)
    (space,) = TensorCoreMatmul().spaces(func, TARGET).values()
    tile = space.default
    assert tile.split > 1
    assert n // tile.block_channels * -(-rows // tile.block_tokens) * tile.split >= 128


def kernels_with(stages):
    tiles = {"65-256": (1, 8, 4, 1, 1, 2, 3), "257+": (1, 8, 4, 1, 1, 2, stages)}
    kernel = scheduled(plain(layout_of(64, 128, group_size=128), None), TARGET, **tiles)
    kernel = kernel.with_attr({"tirx.is_scheduled": True, "global_symbol": "main"})
    with record_launches() as launches:
        tvm.compile(tvm.IRModule({"main": kernel}), TARGET)
    return len(launches)


def test_ranges_of_rows_with_the_same_kernel_share_it():
    """The last two have the same tile, or another number of stages."""
    assert kernels_with(3) == kernels_with(4) - 1

"""What test_attention_cuda would see: each fault put into the kernel changes its numbers, or does
what the emulator does not bear."""

import numpy as np
import pytest
from attention_cuda_runs import TARGET, assert_close, inputs, kernel, run
from attention_runs import static_types
from gpu_block import EmulationError
from gpu_emulator import Emulated

from tir_schedules.attention import cuda, cuda_block, cuda_fma, cuda_mma, cuda_softmax
from tir_schedules.attention.cuda_block import Block
from tir_schedules.attention.cuda_products import Products
from tir_schedules.attention.cuda_softmax import Softmax
from tir_schedules.attention.cuda_tiling import Tiling


def halves_of_the_right_factor_swapped(patch):
    multiply = cuda_mma.multiply_add

    def swapped(product, first, left, right, dtype):
        multiply(product, first, left, right[::-1], dtype)

    patch(cuda_mma, "multiply_add", swapped)


def values_not_transposed(patch):
    load = cuda_mma.load_matrices
    patch(cuda_mma, "load_matrices", lambda r, i, s, at, transposed=False: load(r, i, s, at))


def rows_of_the_left_factor_swapped(patch):
    multiply = cuda_mma.multiply_add

    def swapped(product, first, left, right, dtype):
        multiply(product, first, [left[i] for i in (1, 0, 3, 2)], right, dtype)

    patch(cuda_mma, "multiply_add", swapped)


def pairs_swapped(patch):
    pack = cuda_mma.pack
    patch(cuda_mma, "pack", lambda to, low, high, dtype: pack(to, high, low, dtype))


def no_reduction_over_lanes(patch):
    patch(cuda_softmax, "over_quad", lambda *_: None)


def no_decay(patch):
    patch(Products, "decay", lambda *_: None)


def nothing_hidden(patch):
    patch(Block, "sees_all", lambda *_: cuda_block.int64(0) == 0)


def one_tile_too_few(patch):
    tiles = Block.key_tiles
    patch(Block, "key_tiles", lambda self: (tiles(self)[0], tiles(self)[1] - 1))


def keys_of_another_head(patch):
    keys = Block._keys

    def other(self, first_key):
        def source(row):
            (batch, head, key), is_there = keys(self, first_key)(row)
            return [batch, 1 - head, key], is_there

        return source

    patch(Block, "_keys", other)


def scores_of_the_wrong_row(patch):
    bound = Softmax._bound
    patch(Softmax, "_bound", lambda self, first_key: bound(self, first_key + 1))


def keys_overwritten_too_early(patch):
    patch(cuda, "synchronize", lambda: None)


def read_too_early(patch):
    wait = cuda.wait_for_copies
    patch(cuda, "wait_for_copies", lambda pending=0: wait(pending + 1))


def copied_from_beyond_the_end(patch):
    copy = cuda_block.copy_chunk
    patch(
        cuda_block,
        "copy_chunk",
        lambda to, at, source, _, size: copy(to, at, source, True, size),
    )


def rows_too_close_in_shared_memory(patch):
    patch(Tiling, "pitch", property(lambda self: self.spec.head_dim))


def weights_of_another_lane(patch):
    of_quad = cuda_fma.from_lane_of_quad
    patch(cuda_fma, "from_lane_of_quad", lambda value, lane: of_quad(value, 3 - lane))


def neighbours_in_reverse(patch):
    store = cuda_fma.store_words
    patch(cuda_fma, "store_words", lambda address, values: store(address, values[::-1]))


def every_block_on_the_same_rows(patch):
    place = cuda_block._place
    one = cuda_block.tirx.const(1, "uint32")
    patch(cuda_block, "_place", lambda x, tiling: (one, place(x, tiling)[1]))


TENSOR_CORES = [
    halves_of_the_right_factor_swapped,
    values_not_transposed,
    rows_of_the_left_factor_swapped,
    pairs_swapped,
]
SCALAR_UNITS = [weights_of_another_lane, neighbours_in_reverse]
WRONG_NUMBERS = [
    no_reduction_over_lanes,
    no_decay,
    nothing_hidden,
    one_tile_too_few,
    keys_of_another_head,
    scores_of_the_wrong_row,
]
NOT_BORNE = {
    keys_overwritten_too_early: "overwritten while other threads may read it",
    read_too_early: "before its copy is complete",
    copied_from_beyond_the_end: "out of bounds",
    rows_too_close_in_shared_memory: "",
    every_block_on_the_same_rows: "not written once",
}


FORMS = {"float16": {"width": 16}, "float32": {"width": 20, "value_width": 12}}


@pytest.fixture
def patch(monkeypatch):
    return monkeypatch.setattr


def drawn(dtype):
    rng = np.random.default_rng(0)
    return inputs(rng, (1, 40, 140), heads=(4, 2), dtype=dtype, **FORMS[dtype])


def run_causal(arrays):
    return run(Emulated(kernel(static_types(arrays), causal=99), TARGET), arrays)


@pytest.mark.parametrize("dtype", FORMS)
def test_the_kernel_itself_passes(dtype):
    arrays = drawn(dtype)
    assert_close(run_causal(arrays), arrays, causal=99)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *((fault, "float16") for fault in TENSOR_CORES + WRONG_NUMBERS),
        *((fault, "float32") for fault in SCALAR_UNITS + WRONG_NUMBERS[:2]),
    ],
)
def test_wrong_numbers_are_seen(fault, dtype, patch):
    arrays = drawn(dtype)
    fault(patch)
    out = run_causal(arrays)
    with pytest.raises(AssertionError):
        assert_close(out, arrays, causal=99)


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("fault", NOT_BORNE)
def test_faults_that_a_gpu_may_hide_are_seen(fault, dtype, patch):
    arrays = drawn(dtype)
    fault(patch)
    with pytest.raises(EmulationError, match=NOT_BORNE[fault]):
        run_causal(arrays)

"""What test_attention_cuda would see: each fault put into the kernel changes its numbers, or does
what the emulator does not bear."""

import numpy as np
import pytest
from attention_cuda_runs import TARGET, assert_close, inputs, kernel, run, static_types
from gpu_emulator import Emulated, EmulationError

from tir_schedules import attention_cuda, attention_cuda_block, attention_cuda_softmax
from tir_schedules.attention_cuda_block import Block, Tiling
from tir_schedules.attention_cuda_softmax import Softmax


def halves_of_the_right_factor_swapped(patch):
    multiply = attention_cuda.multiply_add

    def swapped(product, first, left, right, dtype):
        multiply(product, first, left, right[::-1], dtype)

    patch(attention_cuda, "multiply_add", swapped)


def values_not_transposed(patch):
    load = attention_cuda.load_matrices
    patch(attention_cuda, "load_matrices", lambda r, i, s, at, transposed=False: load(r, i, s, at))


def rows_of_the_left_factor_swapped(patch):
    multiply = attention_cuda.multiply_add

    def swapped(product, first, left, right, dtype):
        multiply(product, first, [left[i] for i in (1, 0, 3, 2)], right, dtype)

    patch(attention_cuda, "multiply_add", swapped)


def pairs_swapped(patch):
    pack = attention_cuda.pack
    patch(attention_cuda, "pack", lambda to, low, high, dtype: pack(to, high, low, dtype))


def no_reduction_over_lanes(patch):
    patch(attention_cuda_softmax, "over_quad", lambda *_: None)


def no_decay(patch):
    patch(attention_cuda, "_decay", lambda *_: None)


def nothing_hidden(patch):
    patch(Block, "sees_all", lambda *_: attention_cuda_block.int64(0) == 0)


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
    patch(attention_cuda, "synchronize", lambda: None)


def read_too_early(patch):
    wait = attention_cuda.wait_for_copies
    patch(attention_cuda, "wait_for_copies", lambda pending=0: wait(pending + 1))


def copied_from_beyond_the_end(patch):
    copy = attention_cuda_block.copy_chunk
    patch(attention_cuda_block, "copy_chunk", lambda to, at, source, _: copy(to, at, source, True))


def rows_too_close_in_shared_memory(patch):
    patch(Tiling, "pitch", property(lambda self: self.spec.head_dim))


WRONG_NUMBERS = [
    halves_of_the_right_factor_swapped,
    values_not_transposed,
    rows_of_the_left_factor_swapped,
    pairs_swapped,
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
}


@pytest.fixture
def arrays():
    return inputs(np.random.default_rng(0), (1, 40, 140), heads=(4, 2), width=16)


@pytest.fixture
def patch(monkeypatch):
    return monkeypatch.setattr


def run_causal(arrays):
    return run(Emulated(kernel(static_types(arrays), causal=99), TARGET), arrays)


def test_the_kernel_itself_passes(arrays):
    out = run_causal(arrays)
    assert_close(out, arrays, causal=99)


@pytest.mark.parametrize("fault", WRONG_NUMBERS, ids=lambda fault: fault.__name__)
def test_wrong_numbers_are_seen(fault, arrays, patch):
    fault(patch)
    out = run_causal(arrays)
    with pytest.raises(AssertionError):
        assert_close(out, arrays, causal=99)


@pytest.mark.parametrize("fault", NOT_BORNE, ids=lambda fault: fault.__name__)
def test_faults_that_a_gpu_may_hide_are_seen(fault, arrays, patch):
    fault(patch)
    with pytest.raises(EmulationError, match=NOT_BORNE[fault]):
        run_causal(arrays)

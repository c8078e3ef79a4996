"""PruneRedundantAttention: chains of views that are less than they seem."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pruning import assert_same_values, function, ops, prune, tensor
from tvm import relax, tirx
from tvm.relax import op as R
from tvm_ffi import structural_equal

B, S = tirx.Var("b", "int64"), tirx.Var("s", "int64")


def chain(*steps):
    """One view after the other; a step is (op, arguments)."""

    def make(emit, x):
        for op, *arguments in steps:
            x = emit(getattr(R, op)(x, *arguments))
        return emit(R.tanh(x))

    return make


GONE = {
    "same shape": [("reshape", (B, 4, S, 8))],
    "broadcast to the same shape": [("broadcast_to", (B, 4, S, 8))],
    "there and back": [("reshape", (B * 4, S, 8)), ("reshape", (B, 4, S, 8))],
    "view of eager attention": [
        ("broadcast_to", (B, 4, S, 8)), ("reshape", (B * 4, S, 8)), ("reshape", (B, 4, S, 8)),
    ],
    "turned twice": [("permute_dims", [0, 2, 1, 3]), ("permute_dims", [0, 2, 1, 3])],
    "turned round": [("permute_dims", [1, 2, 3, 0])] * 4,
    "one axis more and less": [("expand_dims", 2), ("squeeze", 2)],
    "whole slice": [("strided_slice", [3], [0], [8])],
    "repeated once": [("repeat", 1, 1)],
    "flipped twice": [("flip", 1), ("flip", 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", GONE)
def test_chains_that_move_nothing_go(name):
    mod = function(chain(*GONE[name]), tensor(B, 4, S, 8))
    out, rows = prune(mod, "views")
    assert ops(out) == {"tanh": 1}
    assert rows[-1].reason == "its elements are those of `a0`, each in its place"
    assert_same_values(mod, out, (2, 5), (1, 1), exact=True)


ONE = {
    "split and merged otherwise": (
        [("reshape", (B * 4, S, 8)), ("reshape", (B * 4 * S, 2, 4))], "reshape",
    ),
    "two turns": ([("permute_dims", [0, 2, 1, 3]), ("permute_dims", [0, 1, 3, 2])], "permute_dims"),
    "two axes inserted": ([("expand_dims", 1), ("expand_dims", 3)], "expand_dims"),
    "an axis of 1 moved": ([("expand_dims", 0), ("permute_dims", [1, 0, 2, 3, 4])], "expand_dims"),
    "axes, then broadcast": (
        [("expand_dims", 0), ("broadcast_to", (3, B, 4, S, 8))], "broadcast_to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_chains_that_are_one_move_become_it(name):
    steps, op = ONE[name]
    mod = function(chain(*steps), tensor(B, 4, S, 8))
    out, rows = prune(mod, "views")
    assert ops(out) == {"tanh": 1, op: 1}
    assert rows[-1].reason in (f"2 views of `a0` are one {op}", "2 reshapes of `a0` are one")
    assert_same_values(mod, out, (2, 5), (1, 1), exact=True)


def test_extents_of_0_are_no_signs_for_others():
    steps = [("reshape", relax.ShapeExpr([2, 0])), ("reshape", relax.ShapeExpr([3, 0]))]
    mod = function(chain(*steps), tensor(5, 0))
    out, rows = prune(mod, "views")
    assert [row.reason for row in rows] == ["2 reshapes of `a0` are one"]
    assert out["main"].ret_ty == mod["main"].ret_ty


def field(shape, axis, index, *between):
    """Field `index` of `axis` after a reshape."""

    def make(emit, x):
        x = emit(R.reshape(x, shape))
        for op, *arguments in between:
            x = emit(getattr(R, op)(x, *arguments))
        return emit(R.tanh(emit(R.take(x, tirx.IntImm("int64", index), axis))))

    return make


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_field_of_packed_projections_is_a_slice(index):
    """As PyTorch's MultiheadAttention takes q, k and v out of one product."""
    turned = [("expand_dims", 0), ("permute_dims", [3, 1, 2, 0, 4]), ("squeeze", 3)]
    mod = function(field((S, B, 3, 8), 0, index, *turned), tensor(S, B, 24))
    out, rows = prune(mod, "views")
    assert ops(out) == {"strided_slice": 1, "tanh": 1}
    assert rows[-1].reason == f"elements {8 * index} to {8 * index + 8} of axis 2 of `a0`"
    assert_same_values(mod, out, (2, 5), (1, 1), exact=True)


@pytest.mark.parametrize(
    ("shape", "axis"), [((S, B, 8, 3), 3), ((S, B, 3, 8), 3)], ids=["every third", "one of each"]
)
def test_a_field_that_is_no_slice_stays(shape, axis):
    mod = function(field(shape, axis, 1), tensor(S, B, 24))
    assert prune(mod, "views") == (mod, [])


STAY = {
    "same shape, other order": (
        [("permute_dims", None), ("reshape", (4, 8))], (4, 8),
    ),
    "turned once": ([("permute_dims", None)], (8, 8)),
    "flipped": ([("flip", 0)], (8, 8)),
    "half, twice": ([("strided_slice", [0], [0], [4]), ("repeat", 2, 0)], (8, 8)),
    "back to front": ([("strided_slice", [0], [7], [-9], [-1])], (8, 8)),
    "heads repeated": (
        [("expand_dims", 1), ("broadcast_to", (8, 2, 8)), ("reshape", (16, 8))], (8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_chains_that_move_elements_stay(name):
    steps, shape = STAY[name]
    mod = function(chain(*steps), tensor(*shape))
    assert prune(mod, "views") == (mod, [])


def test_types_stay_as_they_are():
    """s · b and b · s are one number, but two types."""
    steps = [("reshape", (B, S, 8)), ("reshape", (B * S, 8))]
    mod = function(lambda emit, x, _: chain(*steps)(emit, x), tensor(S * B, 8), tensor(B, S))
    out, rows = prune(mod, "views")
    assert rows[0].reason == "2 reshapes of `a0` are one"
    assert structural_equal(out["main"].ret_ty, mod["main"].ret_ty)


def test_what_others_read_stays():
    def make(emit, x):
        flat = emit(R.reshape(x, (B * 4, S, 8)))
        back = emit(R.reshape(flat, (B, 4, S, 8)))
        return emit(relax.Tuple([emit(R.tanh(back)), emit(R.exp(flat))]))

    mod = function(make, tensor(B, 4, S, 8))
    out, _ = prune(mod, "views")
    assert ops(out) == {"reshape": 1, "tanh": 1, "exp": 1}
    assert_same_values(mod, out, (2, 5), exact=True)


def _factors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def views(draw):
    """A shape, and up to six views one after the other."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    first, steps = tuple(shape), []
    for _ in range(draw(st.integers(1, 6))):
        step, shape = _step(draw, shape)
        steps.append(step)
    return first, steps


def _step(draw, shape):
    rank, size = len(shape), 1
    for extent in shape:
        size *= extent
    kind = draw(st.sampled_from(["reshape", "permute_dims", "expand_dims", "broadcast_to", "flip"]))
    axis = draw(st.integers(0, rank - 1))
    if kind == "permute_dims":
        order = list(draw(st.permutations(range(rank))))
        return (kind, order), [shape[i] for i in order]
    if kind == "expand_dims" and rank < 5:
        return (kind, axis), [*shape[:axis], 1, *shape[axis:]]
    if kind == "broadcast_to" and shape[axis] == 1 and size < 200:
        times = draw(st.sampled_from([1, 2, 3]))
        shape = [*shape[:axis], times, *shape[axis + 1 :]]
        return (kind, shape), shape
    if kind == "flip":
        return (kind, axis), shape
    outer = draw(st.sampled_from(_factors(size)))
    inner = draw(st.sampled_from(_factors(size // outer)))
    shape = [outer, inner, size // outer // inner]
    return ("reshape", shape), shape


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(views())
def test_random_chains_keep_every_element(drawn):
    shape, steps = drawn
    mod = function(chain(*steps), tensor(*shape))
    out, _ = prune(mod, "views")
    assert sum(ops(out).values()) <= sum(ops(mod).values())
    assert_same_values(mod, out, exact=True)

"""The element that a chain of views reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op as R

from tests.relax_passes.index_expressions import View, function_of, view_of

b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")
Step = Callable[[relax.Expr], relax.Expr]


def view(shape: Sequence, *steps: Step) -> View:
    def build(bb: relax.BlockBuilder) -> relax.Expr:
        result: relax.Expr = x
        for step in steps:
            result = bb.emit(step(result))
        return result

    x = relax.Var("x", relax.TensorType(list(shape), "float32"))
    result, lookup = function_of([x], build)
    found = view_of(result, lookup)
    assert found.source.same_as(x)
    return found


def indices(found: View) -> str:
    """As written in Python: 7 is T.int64(7)."""
    text = ", ".join(str(index) for index in found.indices)
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", text)


def heads(x: relax.Expr) -> relax.Expr:
    return R.permute_dims(R.reshape(x, (b, s, 4, 8)), [0, 2, 1, 3])


@pytest.mark.parametrize(
    ("shape", "steps", "expected"),
    [
        pytest.param((b, s, 32), [lambda x: x], "i0, i1, i2", id="no view"),
        pytest.param(
            (b, s, 32),
            [lambda x: R.reshape(x, (b * s, 32)), lambda x: R.reshape(x, (b, s, 32))],
            "i0, i1, i2",
            id="rows folded and unfolded",
        ),
        pytest.param(
            (b, s, 4, 8),
            [
                lambda x: R.permute_dims(x, [0, 2, 1, 3]),
                lambda x: R.reshape(x, (b * 4, s, 8)),
                lambda x: R.reshape(x, (b, 4, s, 8)),
                lambda x: R.permute_dims(x, [0, 2, 1, 3]),
                lambda x: R.reshape(x, (b, s, 32)),
            ],
            "i0, i1, i2 // 8, i2 % 8",
            id="heads folded into batch",
        ),
        pytest.param(
            (b, s, 4, 8),
            [
                lambda x: R.reshape(x, (b * s, 32)),
                lambda x: R.reshape(x, (s, b, 4, 8)),
            ],
            "(i0 * b + i1) // s, (i0 * b + i1) % s, i2, i3",
            id="batch and sequence exchanged, exact",
        ),
        pytest.param(
            (b, 2, s, 8),
            [
                lambda x: R.expand_dims(x, 2),
                lambda x: R.broadcast_to(x, (b, 2, 3, s, 8)),
                lambda x: R.reshape(x, (b, 6, s, 8)),
            ],
            "i0, i1 // 3, i2, i3",
            id="grouped heads by broadcast",
        ),
        pytest.param(
            (b, 2, s, 8), [lambda x: R.repeat(x, 3, 1)], "i0, i1 // 3, i2, i3", id="repeat"
        ),
        pytest.param(
            (b, 2, s, 8), [lambda x: R.tile(x, [1, 3, 1, 1])], "i0, i1 % 2, i2, i3", id="tile"
        ),
        pytest.param(
            (b, s, 96),
            [lambda x: R.split(x, 3, -1), lambda x: relax.TupleGetItem(x, 2)],
            "i0, i1, i2 + 64",
            id="packed projections by split",
        ),
        pytest.param(
            (b, s, 96),
            [
                lambda x: R.reshape(x, (b, s, 3, 4, 8)),
                lambda x: R.permute_dims(x, [2, 0, 3, 1, 4]),
                lambda x: R.strided_slice(x, [0], [1], [2]),
                lambda x: R.squeeze(x, [0]),
            ],
            "i0, i2, i1 * 8 + i3 + 32",
            id="packed projections by slice",
        ),
        pytest.param(
            (1, s), [lambda x: R.broadcast_to(x, (b, s))], "0, i1", id="the only row of all"
        ),
        pytest.param((s, 8), [lambda x: R.flip(x, 0)], "s - i0 - 1, i1", id="flip"),
        pytest.param(
            (8, 16),
            [lambda x: R.strided_slice(x, [1], [-1], [-100], [-2])],
            "i0, 15 - i1 * 2",
            id="backwards",
        ),
        pytest.param(
            (8, s),
            [lambda x: R.take(x, relax.const(np.array([2, 3, 4])), axis=0)],
            "i0 + 2, i1",
            id="take of a range",
        ),
        pytest.param(
            (b, 2, s, 8),
            [
                lambda x: R.take(
                    x, R.floor_divide(R.arange(0, 6, 1, "int64"), relax.const(3, "int64")), axis=1
                )
            ],
            "i0, i1 // 3, i2, i3",
            id="repeat by take",
        ),
    ],
)
def test_says_which_element_is_read(shape: Sequence, steps: list[Step], expected: str) -> None:
    assert indices(view(shape, *steps)) == expected


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_place_that_may_lie_outside_is_no_view(shift: int) -> None:
    def build(bb: relax.BlockBuilder) -> relax.Expr:
        places = R.add(R.arange(0, s, 1, "int64"), relax.const(shift, "int64"))
        return bb.emit(R.take(x, bb.emit(places), axis=0))

    x = relax.Var("x", relax.TensorType([s, 8], "float32"))
    result, lookup = function_of([x], build)
    assert lookup(view_of(result, lookup).source).op.name == "relax.take"

"""`visibility`: the bounds that it reads from a mask, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as R

from relax_passes.index_analysis.visibility import (
    Visibility,
    additive_visibility,
    every_row_sees_a_key,
    visibility,
)
from tests.relax_passes.index_expressions import function_of
from tests.relax_passes.mask_programs import s, t


def read(
    build: Callable[[relax.BlockBuilder, relax.Var], relax.Expr], queries: Any = s, keys: Any = s
) -> Visibility | tuple[Visibility, float] | None:
    """What is read from a mask built over (queries, keys), with a (2, keys) padding at hand."""
    padding = relax.Var("padding", relax.TensorType([2, keys], "bool"))
    mask, lookup = function_of([padding], lambda bb: build(bb, padding))
    reader = visibility if mask.ty.dtype == "bool" else additive_visibility
    return reader(mask, lookup, [2, 4, queries, keys])


def arange(n: Any) -> relax.Expr:
    return R.arange(0, n, 1, "int64")


def row(n: Any, first: Any = 0) -> relax.Expr:
    return R.reshape(R.arange(first, first + n, 1, "int64"), (n, 1))


def exported_rows() -> relax.Expr:
    """Positions i + (t - s), the offset as torch.export writes it: a tensor of a shape."""
    offset = R.reshape(R.shape_to_tensor(relax.ShapeExpr([t - s])), [])
    return R.add(row(s), offset)


def number(value: int) -> relax.Expr:
    return relax.const(value, "int64")


def below(offset: int) -> relax.Expr:
    return R.less_equal(arange(s), R.add(row(s), number(offset)))


TRIL = relax.const(np.tril(np.ones((16, 16), bool)))


def cut(table: relax.Expr, begin: Any, queries: Any, keys: Any) -> relax.Expr:
    ends = [begin + queries, keys]
    return R.strided_slice(table, [0, 1], [begin, 0], ends, [1, 1], assume_inbound=True)


@pytest.mark.parametrize(
    ("build", "queries", "keys", "upper", "lower"),
    [
        pytest.param(lambda: R.less_equal(arange(s), row(s)), s, s, 0, None, id="compare"),
        pytest.param(
            lambda: R.less_equal(arange(t), row(s, t - s)), s, t, t - s, None, id="bottom right"
        ),
        pytest.param(
            lambda: R.less_equal(arange(t), exported_rows()), s, t, t - s, None, id="exported"
        ),
        pytest.param(lambda: R.less_equal(arange(t), row(1, t - 1)), 1, t, None, None, id="decode"),
        pytest.param(lambda: cut(TRIL, 0, s, s), s, s, 0, None, id="stored triangle"),
        pytest.param(lambda: cut(TRIL, t - s, s, t), s, t, t - s, None, id="stored, from the end"),
        pytest.param(
            lambda: R.astype(R.tril(R.ones((s, s), "float32"), 0), "bool"), s, s, 0, None, id="tril"
        ),
        pytest.param(
            lambda: R.logical_not(R.astype(R.triu(R.ones((s, s), "int64"), 1), "bool")),
            s, s, 0, None, id="not triu",
        ),
        pytest.param(
            lambda: R.less(R.abs(R.subtract(row(s), arange(s))), number(4)),
            s, s, 3, -3, id="window on both sides",
        ),
        pytest.param(
            lambda: R.logical_or(
                R.less_equal(arange(s), row(s)), R.greater(arange(s), R.add(row(s), number(1)))
            ),
            s, s, "rest", None, id="all but one diagonal is no band",
        ),
        pytest.param(
            lambda: R.logical_or(R.less_equal(arange(s), row(s)), R.greater(arange(s), row(s))),
            s, s, None, None, id="a mask that hides nothing",
        ),
        pytest.param(
            lambda: R.less_equal(
                R.multiply(arange(s), number(2)),
                R.add(R.multiply(row(s), number(2)), number(3)),
            ),
            s, s, 1, None, id="half steps",
        ),
        pytest.param(
            lambda: R.less(arange(s), R.reshape(R.cumsum(R.ones((s,), "int64")), (s, 1))),
            s, s, 0, None, id="counted positions",
        ),
        pytest.param(
            lambda: R.logical_or(
                R.logical_and(below(1), below(-2)), R.logical_and(below(-3), below(-4))
            ),
            s, s, -2, None, id="unions of intersections",
        ),
        pytest.param(
            lambda: R.astype(relax.const(np.eye(16, dtype=np.uint8)), "bool"),
            16, 16, 0, 0, id="a stored diagonal of bytes",
        ),
        pytest.param(
            lambda: R.greater_equal(row(s), number(0)), s, s, None, None, id="bidirectional"
        ),
        pytest.param(lambda: R.less(arange(s), number(0)), s, s, -s, None, id="hides everything"),
        pytest.param(
            lambda: R.equal(
                R.floor_divide(row(s), number(4)), R.floor_divide(arange(s), number(4))
            ),
            s, s, "rest", None, id="chunks are no band",
        ),
        pytest.param(
            lambda: R.logical_or(R.less_equal(arange(s), row(s)), R.less(arange(s), number(3))),
            s, s, "rest", None, id="a prefix is no band",
        ),
        pytest.param(
            lambda: R.less_equal(R.multiply(arange(s), number(2)), row(s)),
            s, s, "rest", None, id="another slope is no band",
        ),
    ],
)  # fmt: skip
def test_reads_bands(
    build: Callable[[], relax.Expr], queries: Any, keys: Any, upper: Any, lower: Any
) -> None:
    found = read(lambda bb, _: nested(bb, build()), queries, keys)
    if isinstance(upper, str):
        assert (found.upper, found.lower) == (None, None)
        assert len(found.rest) == 1
    else:
        assert found.rest == ()
        assert [str(found.upper), str(found.lower)] == [index(upper), index(lower)]


def index(value: Any) -> str:
    return f"T.int64({value})" if isinstance(value, int) else str(value)


def nested(bb: relax.BlockBuilder, call: relax.Expr) -> relax.Expr:
    """The variable of a nested call, each argument of which is bound to one, too."""
    return bb.emit(call)


def test_padding_stays_beside_the_proved_bound() -> None:
    def build(bb: relax.BlockBuilder, padding: relax.Var) -> relax.Expr:
        causal = bb.emit(R.less_equal(arange(s), row(s)))
        spread = bb.emit(R.expand_dims(padding, [1, 2]))
        kept.append(spread)
        both = bb.emit(R.logical_and(causal, spread))
        return bb.emit(R.where(both, relax.const(0.0), relax.const(float("-inf"))))

    kept: list[relax.Var] = []
    found, fill = read(build)
    assert (str(found.upper), found.lower, fill) == ("T.int64(0)", None, float("-inf"))
    assert len(found.rest) == 1
    assert found.rest[0].same_as(kept[0])
    assert not every_row_sees_a_key(found, [2, 4, s, s])


def test_an_or_with_padding_is_not_taken_apart() -> None:
    def build(bb: relax.BlockBuilder, padding: relax.Var) -> relax.Expr:
        causal = bb.emit(R.less_equal(arange(s), row(s)))
        return bb.emit(R.logical_or(causal, bb.emit(R.expand_dims(padding, [1, 2]))))

    found = read(build)
    assert (found.upper, found.lower, len(found.rest)) == (None, None, 1)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(lambda c: R.where(c, relax.const(-1.0), relax.const(0.5)), id="positive"),
        pytest.param(lambda c: R.astype(c, "float32"), id="a bool that is added"),
        pytest.param(
            lambda c: R.multiply(
                R.astype(R.subtract(row(s), arange(s)), "float32"), relax.const(-0.5)
            ),
            id="slopes",
        ),
        pytest.param(
            lambda c: R.multiply(R.astype(c, "float32"), relax.const(float("-inf"))),
            id="0 times infinity",
        ),
    ],
)
def test_other_additive_masks_are_none(mask: Callable[[relax.Expr], relax.Expr]) -> None:
    def build(bb: relax.BlockBuilder, _padding: relax.Var) -> relax.Expr:
        return bb.emit(mask(bb.emit(R.less_equal(arange(s), row(s)))))

    assert read(build) is None


def test_run_time_positions_are_no_facts() -> None:
    positions = relax.Var("positions", relax.TensorType([2, s], "int64"))

    def build(bb: relax.BlockBuilder) -> relax.Expr:
        query = bb.emit(R.expand_dims(positions, [1, 3]))
        return bb.emit(R.less_equal(arange(s), query))

    mask, lookup = function_of([positions], build)
    found = visibility(mask, lookup, [2, 4, s, s])
    assert (found.upper, found.lower) == (None, None)
    assert found.rest[0].same_as(mask)


@pytest.mark.parametrize(
    ("upper", "lower", "dims", "expected"),
    [
        (0, None, (s, s), True),
        (t - s, None, (s, t), False),  # more queries than keys
        (-1, None, (s, s), False),
        (0, -3, (s, s), True),
        (None, 1, (s, s), False),  # the last query
        (None, None, (s, t), False),  # no keys
        (None, None, (s, 4), True),
        (0, 1, (s, s), False),
    ],
)
def test_empty_rows(upper: Any, lower: Any, dims: tuple, expected: bool) -> None:
    found = Visibility(as_index(upper), as_index(lower))
    assert every_row_sees_a_key(found, [as_index(d) for d in (2, 4, *dims)]) is expected


def as_index(value: Any) -> Any:
    return tvm.tirx.IntImm("int64", value) if isinstance(value, int) else value


def test_a_tensor_stands_only_for_what_it_is_everywhere() -> None:
    """Above the diagonal max(i, j) > limit is j > limit; elsewhere it is not."""
    limit = relax.Var("limit", relax.TensorType([1, 1], "int64"))

    def build(bb: relax.BlockBuilder) -> relax.Expr:
        later = bb.emit(R.less_equal(row(s), arange(s)))
        larger = bb.emit(R.greater(R.maximum(row(s), arange(s)), limit))
        first = bb.emit(R.where(later, larger, relax.const(True)))
        kept.extend([first, bb.emit(R.greater(arange(s), limit))])
        return bb.emit(R.logical_and(*kept))

    kept: list[relax.Var] = []
    mask, lookup = function_of([limit], build)
    found = visibility(mask, lookup, [2, 4, s, s])
    assert [expr.name for expr in found.rest] == [expr.name for expr in kept]


def test_a_mask_of_another_length_is_not_read() -> None:
    mask, lookup = function_of([], lambda bb: bb.emit(R.less_equal(arange(s), row(s))))
    found = visibility(mask, lookup, [2, 4, s, t])
    assert (found.upper, found.lower) == (None, None)
    assert found.rest[0].same_as(mask)

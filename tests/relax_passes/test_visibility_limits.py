"""What no proof may rest on: integers that wrap around, slices that are clamped, empty parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op as R

from relax_passes.index_analysis.visibility import Visibility, additive_visibility, visibility
from tests.relax_passes.index_expressions import function_of
from tests.relax_passes.mask_programs import s, t


def variable(name: str, shape: list, dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def constant(value: object, dtype: str) -> relax.Constant:
    return relax.const(np.asarray(value, dtype), dtype)


def positions(dtype: str) -> relax.Expr:
    return R.arange(0, s, 1, dtype)


def dimension(dtype: str) -> relax.Expr:
    return R.astype(R.shape_to_tensor(relax.ShapeExpr([s])), dtype)


def assert_nothing_proved(found: Visibility, mask: relax.Expr) -> None:
    assert (found.upper, found.lower) == (None, None)
    assert [expr.same_as(mask) for expr in found.rest] == [True]


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(
            lambda x: R.equal(R.astype(R.astype(x, "int32"), "int64"), x), id="cast to int32"
        ),
        pytest.param(
            lambda x: R.less(
                R.negative(R.full((s,), constant(1, "uint8"), "uint8")), constant(0, "uint8")
            ),
            id="negative byte",
        ),
        pytest.param(
            lambda x: R.greater_equal(
                R.multiply(positions("int32"), dimension("int32")), constant(0, "int32")
            ),
            id="product of positions in int32",
        ),
        pytest.param(
            lambda x: R.less(
                R.multiply(
                    R.multiply(positions("int64"), constant(1 << 24, "int64")),
                    constant(1 << 48, "int64"),
                ),
                constant(5, "int64"),
            ),
            id="product outside of int64",
        ),
        pytest.param(
            lambda x: R.less(R.full((s,), constant(2**63 + 5, "uint64"), "uint64"),
                             constant(0, "uint64")),
            id="number outside of int64",
        ),
        pytest.param(lambda x: R.less(R.cumsum(constant(1, "int64")), x), id="sum of a scalar"),
    ],
)  # fmt: skip
def test_numbers_without_a_rule(mask: Callable[[relax.Expr], relax.Expr]) -> None:
    x = variable("x", [s], "int64")
    found, lookup = function_of([x], lambda bb: bb.emit(mask(x)))
    assert_nothing_proved(visibility(found, lookup, [2, 4, s, s]), found)


def test_a_slice_from_before_the_start_is_clamped() -> None:
    table = relax.const(np.tril(np.ones((8, 8), bool)))
    mask, lookup = function_of([], lambda bb: bb.emit(R.strided_slice(table, [0], [-10], [8])))
    found = visibility(mask, lookup, [2, 4, 8, 8])
    assert (int(found.upper), found.lower, found.rest) == (0, None, ())


@pytest.mark.parametrize("shape", [(s, t), (8, 8), (1, 8)])
def test_a_tensor_of_another_shape_stands_for_no_part_of_itself(shape: tuple) -> None:
    """The elements of a slice are those of the whole table at the same places."""
    queries, keys = shape
    table = variable("table", [16, t + 4 if queries is s else 16], "bool")

    part = R.strided_slice(table, [0, 1], [0, 0], shape, [1, 1], assume_inbound=True)
    mask, lookup = function_of([table], lambda bb: bb.emit(part))
    assert_nothing_proved(visibility(mask, lookup, [2, 4, queries, keys]), mask)


def test_a_part_that_may_be_empty_says_nothing_of_the_others() -> None:
    """Where s is 0 there is no place in the first part: s ≥ 1 holds only in there."""

    def build(bb: relax.BlockBuilder) -> relax.Expr:
        counted = bb.emit(R.cumsum(bb.emit(R.ones((s,), "int64"))))
        joined = bb.emit(R.concat([counted, bb.emit(R.zeros((t,), "int64"))], axis=0))
        kept.append(bb.emit(R.greater_equal(dimension("int64"), constant(1, "int64"))))
        return bb.emit(R.logical_and(R.greater_equal(joined, constant(0, "int64")), kept[0]))

    kept: list[relax.Var] = []
    mask, lookup = function_of([], build)
    found = visibility(mask, lookup, [2, 4, t, s + t])
    assert [expr.same_as(kept[0]) for expr in found.rest] == [True]


@pytest.mark.parametrize("depth", [40, 150])
def test_nested_choices_end(depth: int) -> None:
    conditions = [variable(f"c{n}", [8], "bool") for n in range(depth)]

    def build(bb: relax.BlockBuilder) -> relax.Expr:
        mask: relax.Expr = constant(0.0, "float32")
        for n, condition in enumerate(conditions):
            mask = bb.emit(R.where(condition, constant(-np.inf if n % 2 else 0.0, "float32"), mask))
        return mask

    mask, lookup = function_of(conditions, build)
    assert below(100, lambda: additive_visibility(mask, lookup, [2, 4, 8, 8])) is None


def test_joined_parts_end() -> None:
    rows = [variable(f"row{n}", [1, t], "bool") for n in range(300)]
    mask, lookup = function_of(rows, lambda bb: bb.emit(R.concat(rows, axis=0)))
    assert_nothing_proved(visibility(mask, lookup, [2, 4, 300, t]), mask)


def below(frames: int, call: Callable) -> object:
    """`call()` that many frames further down, as passes are."""
    return below(frames - 1, call) if frames else call()

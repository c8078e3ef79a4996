"""What `visibility` claims of random masks, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op as R

from relax_passes.index_analysis.visibility import (
    Visibility,
    additive_visibility,
    every_row_sees_a_key,
    visibility,
)
from tests.relax_passes.index_expressions import evaluate, function_of
from tests.relax_passes.mask_programs import SIZES, Program, Twin, s, t

SHAPES = [(s, s), (s, t), (s, s + 2), (1, t), (3, t), (s, 1), (4, 4), (2, 5), (5, 2)]


def shown(found: Visibility, made: list[Twin], queries: int, keys: int, k: int) -> np.ndarray:
    """What a Visibility says, for sizes number k, as a bool (2, 1, queries, keys)."""
    sizes = {s: SIZES[k]["s"], t: SIZES[k]["t"]}
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    result = np.ones((2, 1, queries, keys), bool)
    if found.upper is not None:
        result &= j <= i + evaluate(found.upper, sizes)
    if found.lower is not None:
        result &= j >= i + evaluate(found.lower, sizes)
    for expr in found.rest:
        result &= value_of(expr, made, k)
    return result


def value_of(expr: relax.Expr, made: list[Twin], k: int) -> np.ndarray:
    if isinstance(expr, relax.Var):
        return next(twin.values[k] for twin in made if twin.expr.same_as(expr))
    if expr.op.name == "relax.logical_not":
        return ~value_of(expr.args[0], made, k)
    assert expr.op.name == "relax.equal"
    return value_of(expr.args[0], made, k) == 0


def drawn(data: st.DataObject, finish: Callable[[Program, Twin], Twin]) -> tuple[Any, ...]:
    shape = data.draw(st.sampled_from(SHAPES))
    padding = relax.Var("padding", relax.TensorType([2, 1, 1, shape[1]], "bool"))
    kept: list[tuple[Program, Twin]] = []

    def build(bb: relax.BlockBuilder) -> relax.Expr:
        program = Program(bb, data.draw, shape, padding)
        kept.append((program, finish(program, program.mask(3))))
        return kept[0][1].expr

    _, lookup = function_of([padding], build)
    return *kept[0], lookup, [2, 1, *shape]


def agrees(found: Visibility, program: Program, seen: list[np.ndarray], dims: list) -> None:
    """`found` is right, and so is the claim that no row is empty."""
    every = every_row_sees_a_key(found, dims)
    for k in range(len(SIZES)):
        queries, keys = (program.size(d, k) for d in dims[2:])
        claim = shown(found, program.made, queries, keys, k)
        np.testing.assert_array_equal(claim, np.broadcast_to(seen[k], claim.shape), str(found))
        assert not every or claim.any(-1).all(), found


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_claims_of_random_masks_are_true(data: st.DataObject) -> None:
    program, mask, lookup, dims = drawn(data, lambda program, mask: mask)
    visible = data.draw(st.booleans())
    found = visibility(mask.expr, lookup, dims, visible=visible)
    agrees(found, program, [v == visible for v in mask.values], dims)


def additive(program: Program, mask: Twin) -> Twin:
    """0 where the mask is True, else one value, spelled in some way; or a sum of two of them."""
    fill = float(np.finfo(np.float32).min) if program.draw(st.booleans()) else float("-inf")
    low, zero, one = (relax.const(x, "float32") for x in (fill, 0.0, 1.0))
    low_ = np.float32(fill)
    way = program.draw(st.sampled_from(["where", "product", "minimum", "sum", "triangle"]))
    if way == "where":
        call = R.where(mask.expr, zero, low)
        return program.emit(call, lambda a: np.where(a, np.float32(0), low_), mask)
    if way == "product":
        number = program.emit(R.astype(mask.expr, "float32"), lambda a: a.astype(np.float32), mask)
        rest = program.emit(R.subtract(one, number.expr), lambda a: 1 - a, number)
        with np.errstate(invalid="ignore"):
            return program.emit(R.multiply(rest.expr, low), lambda a: a * low_, rest)
    if way == "triangle":
        full = R.full((program.queries, program.keys), low, "float32")
        diagonal = program.number()

        def upper(k: int) -> np.ndarray:
            sizes = program.size(program.queries, k), program.size(program.keys, k)
            return np.triu(np.full(sizes, low_), diagonal)

        return program.sized(R.triu(program.bb.emit(full), diagonal), upper)
    x, y = additive(program, mask), additive(program, program.mask(1))
    op, compute = (R.minimum, np.minimum) if way == "minimum" else (R.add, np.add)
    with np.errstate(over="ignore"):
        return program.emit(op(x.expr, y.expr), compute, x, y)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_claims_of_random_additive_masks_are_true(data: st.DataObject) -> None:
    program, mask, lookup, dims = drawn(data, additive)
    found = additive_visibility(mask.expr, lookup, dims)
    if found is None:
        return
    allowed = {0.0, found[1]}
    assert all(set(np.unique(v)) <= allowed for v in mask.values), found
    agrees(found[0], program, [v == 0 for v in mask.values], dims)

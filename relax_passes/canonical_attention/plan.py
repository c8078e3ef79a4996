"""From a softmax to the call of `relax.sits.attention` that gives what its value product gives."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from relax_passes.canonical_attention.block import Block
from relax_passes.canonical_attention.bounds import Masking
from relax_passes.canonical_attention.elements import Element, Points
from relax_passes.canonical_attention.frame import sides_of
from relax_passes.canonical_attention.graph import FLOATS, Graph, NearMiss, dtype_of, widest
from relax_passes.canonical_attention.guards import GuardReader
from relax_passes.canonical_attention.layout import Placed
from relax_passes.canonical_attention.scores import ScoreReader
from relax_passes.canonical_attention.weights import WeightReader


@dataclass(frozen=True)
class Softmax:
    """softmax(scores) over one axis, bound to `weights`."""

    weights: relax.Var
    scores: relax.Expr
    axis: int


@dataclass(frozen=True)
class Plan:
    """How to emit one block.

    Attributes
    ----------
    result : relax.Var
        The value product that the block replaces.
    placed : Placed
        Recipes of the operands, the masks, and the result.
    scale, softcap : float
    zero_rows : str
        As `GuardReader.zero_rows`.
    dtype : str
        Of q, k, v.
    softmax_dtypes : tuple of str
        Of the softmax: the first in which the masks can be said.
    masking : Masking or None
        Given, in place of what `masks` say.
    call : relax.Call or None
        The op itself, where the block is one already.
    note : str
        For the report.
    """

    result: relax.Var
    placed: Placed
    scale: float
    softcap: float
    zero_rows: str
    dtype: str
    softmax_dtypes: tuple[str, ...]
    masking: Masking | None = None
    call: relax.Call | None = None
    note: str = ""


def plan(graph: Graph, softmax: Softmax) -> Plan:
    """
    Raises
    ------
    NearMiss
        With the first condition that fails.
    """
    points = Points(graph)
    axes = points.axes_of(softmax.scores, "x")
    start, key_axis = Element(softmax.scores, axes), axes[softmax.axis]
    weights = WeightReader(points, softmax.weights, axes).read()
    scores = ScoreReader(points, key_axis).read(start)
    sides = sides_of(points, scores, key_axis)
    guards = GuardReader(points, scores.masks, start, key_axis)
    zero_rows = guards.zero_rows(weights.guards)
    block = Block(points, start, softmax.axis, sides, weights)
    result, (query, key, value) = weights.product.result, block.operands.trails
    dtypes = [query.dtype, key.dtype, value.dtype]
    if not {*dtypes, dtype_of(result)} <= set(FLOATS):
        raise NearMiss("not-float", f"q, k and v are {', '.join(dtypes)}", result)
    dtype = widest(*dtypes, dtype_of(result))
    return Plan(
        result,
        block.place(scores.masks),
        scores.scale * query.factor * key.factor * (scores.bound or 1.0),
        scores.bound or 0.0,
        zero_rows,
        dtype,
        softmax_dtypes(widest(dtype, dtype_of(softmax.scores))),
        note="weights are returned, too: scores are computed twice" if weights.is_returned else "",
    )


def softmax_dtypes(narrow: str) -> tuple[str, ...]:
    """A softmax in half precision is computed in float32, unless its masks need float16."""
    if narrow == "float16":
        return ("float32", "float16")
    return ("float32" if narrow == "bfloat16" else narrow,)

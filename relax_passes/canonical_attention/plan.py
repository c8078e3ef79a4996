"""From a softmax to the call of `relax.sits.attention` that gives what its value product gives."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from .block import Block
from .bounds import Masking
from .elements import Element, Points
from .frame import sides_of
from .graph import FLOATS, Graph, NearMiss, dtype_of, widest
from .guards import GuardReader
from .layout import Placed
from .scores import ScoreReader
from .weights import WeightReader


@dataclass(frozen=True)
class Divided:
    """A view of the value product, divided by the sum of exponentials, gives `result`."""

    total: relax.Expr
    view: relax.Expr
    result: relax.Var


@dataclass(frozen=True)
class Softmax:
    """softmax(scores) over one axis, bound to `weights`.

    Attributes
    ----------
    axis : int or None
        None: what divides is not proved to be the sum over one axis.
    is_stable : bool
        It is right also where all scores of a row are the lowest number.
    divided : Divided, optional
        `weights` are not divided yet, but the value product is.
    """

    weights: relax.Var
    scores: relax.Expr
    axis: int | None
    is_stable: bool = True
    divided: Divided | None = None


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
    scores_dtypes : tuple of str
        Of scores and masks: the first in which the masks can be said.
    softmax_dtype : str
    uniform_rows : bool
        Rows of nothing but the lowest number have equal weights.
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
    scores_dtypes: tuple[str, ...]
    softmax_dtype: str
    masking: Masking | None = None
    call: relax.Call | None = None
    uniform_rows: bool = True
    note: str = ""


def plan(graph: Graph, softmax: Softmax) -> Plan:
    """
    Raises
    ------
    NearMiss
        With the first condition that fails.
    """
    if softmax.axis is None:
        message = "exponentials are divided by a sum that is not proved to be theirs over one axis"
        raise NearMiss("softmax-sum", message, softmax.weights)
    points = Points(graph)
    axes = points.axes_of(softmax.scores, "x")
    start, key_axis = Element(softmax.scores, axes), axes[softmax.axis]
    divided = softmax.divided
    weights = WeightReader(points, softmax.weights, axes, divided and divided.total).read()
    scores = ScoreReader(points, key_axis).read(start)
    sides = sides_of(points, scores, key_axis)
    guards = GuardReader(points, scores.masks, start, key_axis)
    zero_rows = guards.zero_rows(weights.guards)
    block = Block(points, start, softmax.axis, sides, weights)
    product = weights.product.result
    view, result = (divided.view, divided.result) if divided else (product, product)
    query, key, value = block.operands.trails
    dtypes = [query.dtype, key.dtype, value.dtype]
    if not {*dtypes, dtype_of(result)} <= set(FLOATS):
        raise NearMiss("not-float", f"q, k and v are {', '.join(dtypes)}", result)
    dtype = widest(*dtypes, dtype_of(result))
    wide = softmax_dtype_of(widest(dtype, dtype_of(softmax.scores)))
    return Plan(
        result,
        block.place(scores.masks, view),
        scores.scale * query.factor * key.factor * (scores.bound or 1.0),
        scores.bound or 0.0,
        zero_rows,
        dtype,
        (wide, "float16") if dtype == "float16" else (wide,),
        wide,
        uniform_rows=softmax.is_stable,
        note="weights are returned, too: scores are computed twice" if weights.is_returned else "",
    )


def softmax_dtype_of(dtype: str) -> str:
    """A softmax in half precision is computed in float32."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype

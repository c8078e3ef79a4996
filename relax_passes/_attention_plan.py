"""From a softmax to the call of `relax.sits.attention` that gives what its value product gives."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from relax_passes._attention_elements import Element, Points
from relax_passes._attention_frame import sides_of
from relax_passes._attention_graph import FLOATS, Graph, NearMiss, dtype_of, widest
from relax_passes._attention_guards import GuardReader
from relax_passes._attention_layout import Layout, Placed
from relax_passes._attention_scores import ScoreReader
from relax_passes._attention_weights import WeightReader


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
    is_zero : bool
        Rows that show no key become 0.
    dtype, scores_dtype : str
        Of q, k, v, and of the input of the softmax.
    """

    result: relax.Var
    placed: Placed
    scale: float
    softcap: float
    is_zero: bool
    dtype: str
    scores_dtype: str


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
    is_zero = guards.makes_zero(weights.guards)
    layout = Layout(points, start, softmax.axis, sides, weights)
    result = weights.product.result
    dtypes = [layout.query.dtype, layout.key.dtype, dtype_of(layout.value.base.tensor)]
    if not {*dtypes, dtype_of(result)} <= set(FLOATS):
        raise NearMiss("not-float", f"q, k and v are {', '.join(dtypes)}", result)
    return Plan(
        result,
        layout.place(scores.masks),
        scores.scale * layout.query.factor * layout.key.factor * (scores.bound or 1.0),
        scores.bound or 0.0,
        is_zero,
        widest(*dtypes, dtype_of(result)),
        dtype_of(softmax.scores),
    )

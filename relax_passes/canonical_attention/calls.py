"""Attention that is one op already: TVM's ops as ours, and ours with repeated heads and masks of
known form taken out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tvm
from tvm import relax, tirx

from ..index_analysis.index_domain import Index, integer, is_integer
from .bounds import Masking
from .elements import Element, Points
from .graph import Graph, NearMiss, dtype_of, shape_of
from .layout import Frame, Operand, Operands, Placed, placed_mask
from .operands import Recipe, recipe, views_of
from .plan import Plan, softmax_dtype_of
from .scores import Mask

_OURS = "sits.attention"
_TVM = ("nn.attention", "nn.attention_bias", "nn.attention_var_len")


def is_attention(graph: Graph, var: relax.Var) -> bool:
    return graph.call(var)[0] in (_OURS, *_TVM)


def plan_call(graph: Graph, result: relax.Var) -> Plan:
    """The op again, with operands of the fewest heads.

    Raises
    ------
    NearMiss
        For a form of TVM's op that ours has not.
    """
    name, call = graph.call(result)
    return _ours(graph, result, call) if name == _OURS else _tvm(graph, result, name, call)


def _ours(graph: Graph, result: relax.Var, call: relax.Call) -> Plan:
    attrs = call.attrs
    bias = call.args[3] if len(call.args) > 3 else None
    bounds = attrs["causal"], int(attrs["window"]), attrs["empty_row"]
    given = Masking(*bounds, bias, f"given as R.{_OURS}")
    zero_rows = "infinite" if given.empty_row == "zero" else "none"
    is_open = given.bias is not None and given.causal is None and not given.window
    reads_mask = is_open and given.empty_row != "uniform"
    mask_dtype = str(attrs["scores_dtype"]) if reads_mask else None
    points = Points(graph)
    placed = _place(points, result, call.args, (0, 1, 2, 3), mask_dtype)
    numbers = float(attrs["scale"]), float(attrs["softcap"])
    scores_dtype, softmax_dtype = str(attrs["scores_dtype"]), str(attrs["softmax_dtype"])
    dtype = dtype_of(call.args[0])
    masking = None if reads_mask else given
    return Plan(
        result, placed, *numbers, zero_rows, dtype, (scores_dtype,), softmax_dtype, masking, call
    )


def _tvm(graph: Graph, result: relax.Var, name: str, call: relax.Call) -> Plan:
    """(B, S, H, D), weights exp(scores + bias), causal by name."""
    attrs, args = call.attrs, list(call.args)
    if name == "nn.attention_var_len" or attrs.window_size is not None:
        raise NearMiss("tvm-op", f"R.{name} of packed sequences or with a window", result)
    queries, keys = shape_of(args[0])[1], shape_of(args[1])[1]
    causal = _offset(attrs.causal_mask, queries, keys, result)
    points = Points(graph)
    placed = _place(points, result, args, (0, 2, 1, 3), None)
    size = shape_of(args[0])[3]
    if attrs.scale is None and not is_integer(size):
        raise NearMiss("tvm-op", "no scale is given, and the head size is not static", result)
    scale = int(size) ** -0.5 if attrs.scale is None else float(attrs.scale.value)
    dtype = dtype_of(args[0])
    proof = f"given as R.{name}"
    masking = Masking(causal=causal, bias=args[3] if len(args) > 3 else None, proof=proof)
    wide = softmax_dtype_of(dtype)
    return Plan(result, placed, scale, 0.0, "none", dtype, (wide,), wide, masking)


def _offset(name: str | None, queries: Index, keys: Index, result: relax.Var) -> int | str | None:
    """TVM documents BottomRight as the offset |Sq - Sk|."""
    if name is None:
        return None
    if name == "TopLeft":
        return 0
    if tvm.sym.Analyzer().can_prove(keys >= queries):
        return "bottom_right"
    if is_integer(queries) and is_integer(keys):
        return int(queries) - int(keys)
    message = f"BottomRight of {queries} queries and {keys} keys: which are more is not proved"
    raise NearMiss("tvm-op", message, result)


def _place(
    points: Points,
    result: relax.Var,
    args: Sequence[relax.Expr],
    order: tuple,
    mask_dtype: str | None,
) -> Placed:
    """`order`: where batch, head, position and width lie in the operands' axes."""
    shapes = [[shape_of(x)[n] for n in order] for x in args[:3]]
    heads, groups = shapes[0][1], shapes[1][1]
    if not is_integer(heads) or not is_integer(groups):
        message = f"the numbers of heads, {heads} and {groups}, are not constant"
        raise NearMiss("heads-not-static", message, result)
    extents = (*shapes[0][:3], shapes[1][2])
    axes = tuple(points.axis(name, e) for name, e in zip("bhij", extents, strict=True))
    frame = Frame(axes, extents, {}, axes[:3])
    b, h, i, j = axes
    group = tirx.floordiv(h, int(heads) // int(groups))
    d, w = points.axis("d", shapes[0][3]), points.axis("w", shapes[2][3])

    def operand(tensor: relax.Expr, at: tuple, last: tirx.Var, size: Index) -> Operand:
        index = dict(zip(order, (*at, last), strict=True))
        element = Element(tensor, tuple(index[n] for n in range(4)))
        return Operand(views_of(points, points.simplified(element)), last, size)

    operands = Operands(
        operand(args[0], (b, h, i), d, shapes[0][3]),
        operand(args[1], (b, group, j), d, shapes[0][3]),
        operand(args[2], (b, group, j), w, shapes[2][3]),
    )
    masks = () if mask_dtype is None else _mask(points, frame, args[3], mask_dtype, result)
    q, k, v = operands.placed(points, frame)
    out = _out(points, result, order)
    if q is None or k is None or v is None or out is None:
        raise NearMiss("layout", "q, k and v cannot be laid out as (B, H, S, D)", result)
    return Placed(frame, (q, k, v), masks, out)


def _mask(
    points: Points, frame: Frame, bias: relax.Expr, dtype: str, result: relax.Var
) -> tuple[tuple[Mask, Recipe], ...]:
    shape = shape_of(bias)
    axes = frame.axes[4 - len(shape) :]
    at = [integer(0) if is_integer(e, 1) else a for e, a in zip(shape, axes, strict=True)]
    fill = -math.inf if dtype_of(bias) == "bool" else None
    mask = Mask(Element(bias, tuple(at)), fill, False, 1, dtype, result)
    found = placed_mask(points, mask, frame)
    return ((mask, found),) if found is not None else ((mask, Recipe(bias, (), None, None, None)),)


def _out(points: Points, result: relax.Var, order: tuple) -> Recipe | None:
    axes = points.axes_of(result, "o")
    shape = [shape_of(result)[n] for n in order]
    ours = relax.Var("attention", relax.TensorType(shape, dtype_of(result)))
    element = points.simplified(Element(ours, tuple(axes[n] for n in order)))
    return recipe(points, element, axes, shape_of(result))

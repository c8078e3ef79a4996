"""`relax.sits.attention`: one op for what every model spells differently.

softmax(cap(scale · q kᵀ) + bias, masked) v, neutral of layout and target. `R.nn.attention` is not
used: with grouped heads it reads other batch rows' keys, its causal form gives NaN for very
negative scores, and its bottom-right alignment is wrong for Sq > Sk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op

from sits_tvm.diagnostics import Diagnostic, SitsError

from ._attention_plain import lower_plain
from ._register import register_op

NAME = "relax.sits.attention"
ATTRIBUTES = (
    *("scale", "causal", "window", "softcap", "empty_row"),
    *("scores_dtype", "softmax_dtype"),
)
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_EMPTY_ROWS = ("nan", "zero", "uniform")


def attention(
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    bias: relax.Expr | None = None,
    *,
    scale: float | None = None,
    causal: int | str | None = None,
    window: int = 0,
    softcap: float = 0.0,
    empty_row: str = "nan",
    scores_dtype: str | None = None,
    softmax_dtype: str | None = None,
) -> relax.Call:
    """Scaled dot-product attention with contiguous grouped heads.

    Query head h reads key and value head h // (H / G). The position of query i is
    p(i) = i + offset, of key j it is j.

    Parameters
    ----------
    q : (B, H, Sq, D) float16, bfloat16, float32 or float64
    k : (B, G, Sk, D), dtype of q; G divides H
    v : (B, G, Sk, Dv), dtype of q
    bias : broadcastable to (B, H, Sq, Sk), optional
        bool: True where the key is visible. float: added to the scores, after `softcap`; -inf
        hides the key, whatever its score.
    scale : float, optional
        Multiplies q kᵀ. Default 1 / √D, for a static D.
    causal : int or "bottom_right" or None
        The offset: query i sees key j when j ≤ i + offset. 0 aligns the first query with the first
        key; "bottom_right" is Sk - Sq (the last with the last), also where these are symbolic;
        None: no causal mask, offset 0.
    window : int
        w > 0: query i sees key j only when p(i) - w < j. 0: no window.
    softcap : float
        c > 0: scores become c · tanh(scores / c). 0: left as they are.
    empty_row : str
        The result for a query that sees no key: "nan", "zero", or "uniform" (the mean of all Sk
        values, as an additive mask of the lowest finite number gives; NaN for Sk = 0).
    scores_dtype : str, optional
        To which scale · q kᵀ is rounded, and in which `softcap` and masks are applied; not narrower
        than q. Default `softmax_dtype`. T5 adds its bias to float16 scores.
    softmax_dtype : str, optional
        Of the softmax; not narrower than the scores. Default float32, for float64 q float64.

    Returns
    -------
    Call
        (B, H, Sq, Dv), dtype of q. Products accumulate in float32 (float64 for float64).

    Raises
    ------
    SitsError
        For an attribute outside these; all of them. Shapes are checked where the call gets its
        type (`BlockBuilder.emit`, TVMScript), as a ValueError that lists all of them.
    """
    softmax_dtype = _default_softmax_dtype(q) if softmax_dtype is None else softmax_dtype
    attributes: dict[str, Any] = {
        "scale": _default_scale(q) if scale is None else scale,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "empty_row": empty_row,
        "scores_dtype": softmax_dtype if scores_dtype is None else scores_dtype,
        "softmax_dtype": softmax_dtype,
    }
    problems = list(_attribute_problems(attributes))
    if problems:
        help_ = "help(relax_passes.op.attention) lists the attributes"
        raise SitsError([Diagnostic.error("attention-attribute", p, help=help_) for p in problems])
    attributes["scale"], attributes["softcap"] = float(attributes["scale"]), float(softcap)
    args = [q, k, v] if bias is None else [q, k, v, bias]
    return relax.Call(Op.get(NAME), args, attributes)


def _default_scale(q: relax.Expr) -> float | None:
    shape = _shape(q.ty)
    width = shape[-1] if shape else None
    return int(width) ** -0.5 if isinstance(width, tvm.tirx.IntImm) and int(width) > 0 else None


def _default_softmax_dtype(q: relax.Expr) -> str:
    is_double = isinstance(q.ty, relax.TensorType) and q.ty.dtype == "float64"
    return "float64" if is_double else "float32"


def _attribute_problems(attrs: dict[str, Any]) -> Iterator[str]:
    scale, causal, window, softcap = (attrs[k] for k in ("scale", "causal", "window", "softcap"))
    if scale is None:
        yield "scale=None needs a static head dimension; write scale=1/√D as a number"
    elif not _is_number(scale):
        yield f"scale={scale!r} is not a finite number"
    if causal is not None and causal != "bottom_right" and not _is_int(causal):
        yield f"causal={causal!r}: write None, an integer (0 for Sq == Sk) or 'bottom_right'"
    if not _is_int(window) or window < 0:
        yield f"window={window!r}: write a number of keys, or 0 for none"
    if not _is_number(softcap) or softcap < 0:
        yield f"softcap={softcap!r}: write a positive number, or 0.0 for none"
    if attrs["empty_row"] not in _EMPTY_ROWS:
        yield f"empty_row={attrs['empty_row']!r} is not one of {', '.join(_EMPTY_ROWS)}"
    for name in ("scores_dtype", "softmax_dtype"):
        if attrs[name] not in _FLOATS:
            yield f"{name}={attrs[name]!r} is not one of {', '.join(_FLOATS)}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _infer(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    problems = list(_type_problems(call))
    if problems:
        raise ValueError("R.sits.attention: " + "; ".join(problems))
    q, v = call.args[0].ty, call.args[2].ty
    q_shape, v_shape = _shape(q), _shape(v)
    if q_shape is None or v_shape is None:
        return relax.TensorType(dtype=q.dtype, ndim=4)
    return relax.TensorType([*q_shape[:3], v_shape[3]], q.dtype)


def _validate(call: relax.Call) -> None:
    missing = [name for name in ATTRIBUTES if call.attrs is None or name not in call.attrs]
    if missing:
        raise ValueError(f"R.sits.attention: no attribute {', '.join(missing)}")
    problems = list(_attribute_problems({name: call.attrs[name] for name in ATTRIBUTES}))
    if problems:
        raise ValueError("R.sits.attention: " + "; ".join(problems))


def _type_problems(call: relax.Call) -> Iterator[str]:
    if len(call.args) not in (3, 4):
        yield f"takes q, k, v and at most a bias, found {len(call.args)} arguments"
        return
    named = dict(zip("qkv", call.args[:3], strict=True))
    bad = [f"{n} is {x.ty}" for n, x in named.items() if not _is_rank_4_float(x.ty)]
    if bad:
        yield f"q, k, v are (B, H, S, D) tensors of {', '.join(_FLOATS)}; " + ", ".join(bad)
        return
    dtypes = {n: str(x.ty.dtype) for n, x in named.items()}
    if len(set(dtypes.values())) > 1:
        yield f"q, k, v differ in dtype: {dtypes}"
    yield from _narrowings(dtypes["q"], call.attrs)
    yield from _shape_problems(*(_shape(x.ty) for x in named.values()))
    if len(call.args) == 4:
        yield from _bias_problems(call)


def _narrowings(q_dtype: str, attrs: tvm.ir.Attrs) -> Iterator[str]:
    """From q to scores to softmax, no step may lose bits."""
    scores_dtype, softmax_dtype = attrs["scores_dtype"], attrs["softmax_dtype"]
    if _bits(scores_dtype) < _bits(q_dtype):
        yield f"scores_dtype {scores_dtype} is narrower than q ({q_dtype})"
    if _bits(softmax_dtype) < _bits(scores_dtype):
        yield f"softmax_dtype {softmax_dtype} is narrower than scores_dtype {scores_dtype}"


def _shape_problems(q: list | None, k: list | None, v: list | None) -> Iterator[str]:
    shown = f"q {_show(q)}, k {_show(k)}, v {_show(v)}"
    for name, pairs in {
        "batch": [(q, 0, k, 0), (q, 0, v, 0)],
        "head dimension D": [(q, 3, k, 3)],
        "number of keys Sk": [(k, 2, v, 2)],
        "number of key/value heads G": [(k, 1, v, 1)],
    }.items():
        if any(a and b and not _same(a[i], b[j]) for a, i, b, j in pairs):
            yield f"{name} not provably equal: {shown}"
    heads = [x[1] for x in (q, k) if x is not None]
    if not all(isinstance(h, tvm.tirx.IntImm) for h in heads):
        yield f"head counts must be static: {shown}"
    elif len(heads) == 2:
        h, g = map(int, heads)
        if g == 0 or h % g:
            yield f"G={g} key/value heads do not divide H={h} query heads: {shown}"


def _bias_problems(call: relax.Call) -> Iterator[str]:
    q, k, bias = (call.args[i].ty for i in (0, 1, 3))
    if not isinstance(bias, relax.TensorType) or bias.ndim > 4:
        yield f"bias is not a tensor of rank ≤ 4: {bias}"
        return
    if str(bias.dtype) not in ("bool", *_FLOATS):
        yield f"bias is {bias.dtype}; write bool (True = visible) or a float to add"
    shape, q_shape, k_shape = _shape(bias), _shape(q), _shape(k)
    if shape is None or q_shape is None or k_shape is None:
        return
    scores = [*q_shape[:3], k_shape[2]]
    pairs = zip(reversed(shape), reversed(scores), strict=False)
    if not all(_same(a, 1) or _same(a, b) for a, b in pairs):
        yield f"bias {_show(shape)} does not broadcast to (B, H, Sq, Sk) = {_show(scores)}"


def _is_rank_4_float(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and ty.ndim == 4 and str(ty.dtype) in _FLOATS


def _shape(ty: tvm.ir.Type) -> list | None:
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return list(ty.shape) if known else None


def _same(a: tvm.ir.Expr, b: tvm.ir.Expr | int) -> bool:
    return tvm.sym.Analyzer().can_prove_equal(a, b)


def _show(shape: list | None) -> str:
    if shape is None:
        return "(?)"
    return f"({', '.join(str(int(d) if isinstance(d, tvm.tirx.IntImm) else d) for d in shape)})"


def _bits(dtype: str) -> int:
    return int(dtype.lstrip("bfloat"))


register_op(NAME, _infer, attention, legalize=lower_plain, validate=_validate)

"""What a fused kernel needs of a call of `relax.sits.attention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx
from tvm.sym import Analyzer

from ..emit import int64

ATTRIBUTE = "sits.attention"
"""Of a PrimFunc: the attributes of the op, see `AttentionSpec.attributes`."""

_NAMES = ("scale", "causal", "window", "softcap", "empty_row")
_DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class AttentionSpec:
    """The arguments of the kernel and the attributes of the op, see `relax_passes.op.attention`.

    Attributes
    ----------
    q, k, v, out : Buffer
        (B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv) and (B, H, Sq, Dv) of one dtype: float16,
        bfloat16 or float32. H, G, D and Dv are static; B, Sq and Sk are int64 constants or
        variables, the same one where two of them are provably equal. Each may be 0.
    bias : Buffer or None
        Of rank 4 or less, its axes aligned with the last of (B, H, Sq, Sk), each equal to that or
        1. bool: True where the key is visible; else float, added.
    scale, softcap : float
    causal : int or "bottom_right" or None
    window : int
    empty_row : "nan" or "zero" or "uniform"
    """

    q: tirx.Buffer
    k: tirx.Buffer
    v: tirx.Buffer
    out: tirx.Buffer
    bias: tirx.Buffer | None
    scale: float
    causal: int | str | None
    window: int
    softcap: float
    empty_row: str

    @property
    def arguments(self) -> list[tirx.Buffer]:
        """The parameters of the PrimFunc, in order."""
        bias = [] if self.bias is None else [self.bias]
        return [self.q, self.k, self.v, *bias, self.out]

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the op."""
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def batch(self) -> tirx.Expr:
        return self.q.shape[0]

    @property
    def num_queries(self) -> tirx.Expr:
        return self.q.shape[2]

    @property
    def num_keys(self) -> tirx.Expr:
        return self.k.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return int(self.k.shape[1])

    @property
    def group(self) -> int:
        """Query heads of one key/value head."""
        return int(self.q.shape[1]) // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[3])

    @property
    def value_dim(self) -> int:
        return int(self.v.shape[3])

    @property
    def dtype(self) -> str:
        return str(self.q.dtype)

    @property
    def offset(self) -> tirx.Expr:
        """Position of query 0 among the keys, int64."""
        if self.causal == "bottom_right":
            return self.num_keys - self.num_queries
        return int64(self.causal or 0)

    @property
    def first_visible(self) -> tirx.Expr | None:
        """Query i sees only keys from i + `first_visible` on; None: from 0 on."""
        return self.offset - (self.window - 1) if self.window else None

    @property
    def last_visible(self) -> tirx.Expr | None:
        """Query i sees only keys up to i + `last_visible`; None: all."""
        return None if self.causal is None else self.offset


def attention_spec(call: relax.Call) -> AttentionSpec | str:
    """`call` as a kernel sees it, or why no kernel can run it."""
    refusal = _refusal(call)
    if refusal is not None:
        return refusal
    q, k, v, *biases = (argument.ty for argument in call.args)
    batch, num_queries, num_keys = _extents(
        {"batch": q.shape[0], "num_queries": q.shape[2], "num_keys": k.shape[2]}
    )
    heads, kv_heads, width, value_width = (
        int64(int(x)) for x in (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    )
    scores = [batch, heads, num_queries, num_keys]
    bias = None
    if biases:
        dims = zip(biases[0].shape, _last(scores, biases[0].ndim), strict=True)
        shape = [int64(1) if _is_one(dim) else extent for dim, extent in dims]
        bias = tirx.decl_buffer(shape, str(biases[0].dtype), "bias")
    dtype = str(q.dtype)
    return AttentionSpec(
        q=tirx.decl_buffer([batch, heads, num_queries, width], dtype, "q"),
        k=tirx.decl_buffer([batch, kv_heads, num_keys, width], dtype, "k"),
        v=tirx.decl_buffer([batch, kv_heads, num_keys, value_width], dtype, "v"),
        out=tirx.decl_buffer([batch, heads, num_queries, value_width], dtype, "out"),
        bias=bias,
        **_attributes(call.attrs),
    )


def spec_of(func: tirx.PrimFunc) -> AttentionSpec | None:
    """What a PrimFunc computes, if it is the `plain_attention` of a spec."""
    attributes = func.attrs.get(ATTRIBUTE)
    if attributes is None:
        return None
    q, k, v, *bias, out = func.params
    return AttentionSpec(q, k, v, out, bias[0] if bias else None, **_attributes(attributes))


def _refusal(call: relax.Call) -> str | None:
    for name, argument in zip(("q", "k", "v", "bias"), call.args, strict=False):
        if not isinstance(argument.ty.shape, relax.ShapeExpr):
            return f"{name} has no known shape: {argument.ty}"
    q, v = call.args[0].ty, call.args[2].ty
    if str(q.dtype) not in _DTYPES:
        return f"q, k and v are {q.dtype}; the kernel takes {', '.join(_DTYPES)}"
    for name in ("scores_dtype", "softmax_dtype"):
        if call.attrs[name] != "float32":
            return f"{name} is {call.attrs[name]}; the kernel's is float32"
    for name, dim in {"D": q.shape[3], "Dv": v.shape[3]}.items():
        if not isinstance(dim, tirx.IntImm) or int(dim) == 0:
            return f"{name}={dim} is no positive constant"
    if int(q.shape[1]) == 0:
        return "there are no heads"
    if call.args[3:] and str(call.args[3].ty.dtype) == "float64":
        return "the bias is float64; the kernel adds in float32"
    return None


def _extents(dims: dict[str, tirx.Expr]) -> list[tirx.Expr]:
    """Constants as they are, and a variable for each other extent that differs."""
    known: list[tuple[tirx.Expr, tirx.Expr]] = []
    for name, dim in dims.items():
        equal = [extent for other, extent in known if Analyzer().can_prove_equal(dim, other)]
        if isinstance(dim, tirx.IntImm):
            equal = [int64(int(dim))]
        known.append((dim, equal[0] if equal else tirx.Var(name, "int64")))
    return [extent for _, extent in known]


def _last(dims: list[tirx.Expr], count: int) -> list[tirx.Expr]:
    return dims[len(dims) - count :]


def _is_one(dim: tirx.Expr) -> bool:
    return Analyzer().can_prove_equal(dim, 1)


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """As Python numbers, strings or None."""
    found = {name: values[name] for name in _NAMES}
    return {name: str(x) if isinstance(x, str) else x for name, x in found.items()}

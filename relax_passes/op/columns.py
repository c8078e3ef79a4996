"""`relax.sits.columns`: neighbouring columns of a product, which its kernel may write by itself."""

from __future__ import annotations

from tvm import relax, te
from tvm.ir import Op

from ._register import register_op

NAME = "relax.sits.columns"
COLUMNS = "columns"
"""Annotation of the block that reads them, whose value is the first."""
_OUT_ELEMENTWISE_FUSABLE = (
    4  # relax.op_pattern: no views or transposes, which a product can't write
)


def columns(x: relax.Expr, *, first: int, count: int) -> relax.Call:
    """``x[..., first : first + count]`` of a float tensor x (..., n): (..., count)."""
    return relax.Call(Op.get(NAME), [x], {"first": first, "count": count})


def _infer(call: relax.Call, _: relax.BlockBuilder) -> relax.TensorType:
    ty, first, count = call.args[0].ty, int(call.attrs["first"]), int(call.attrs["count"])
    if not isinstance(ty, relax.TensorType) or ty.shape is None or ty.ndim < 1:
        raise TypeError(f"{NAME}: expected a tensor of known shape with columns, got {ty}")
    n = int(ty.shape[-1])
    if first < 0 or count < 1 or first + count > n:
        raise ValueError(f"{NAME}: x has columns 0…{n - 1}, not {first}…{first + count - 1}")
    return relax.TensorType([*list(ty.shape)[:-1], count], str(ty.dtype))


def _legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    first, count = int(call.attrs["first"]), int(call.attrs["count"])

    def read(x: te.Tensor) -> te.Tensor:
        return te.compute(
            (*x.shape[:-1], te.const(count, "int64")),
            lambda *at: x[(*at[:-1], at[-1] + te.const(first, "int64"))],
            name=COLUMNS,
            attrs={COLUMNS: first},
        )

    attrs = {"op_pattern": _OUT_ELEMENTWISE_FUSABLE}
    return bb.call_te(read, call.args[0], primfunc_name_hint=COLUMNS, primfunc_attrs=attrs)


register_op(NAME, _infer, columns, legalize=_legalize)

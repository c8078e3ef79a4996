"""Gradients of matmul, einsum and outer."""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import Op
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R

from ._rules import as_tvm_where_static, cast, dims, gradient, product, reshape, sum_to


@gradient("matmul", in_tvm=as_tvm_where_static)
def _matmul(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """da = g bᵀ, db = aᵀ g. With out_dtype wider than a and b the products are as wide."""
    a, b = call.args
    wide = g.ty.dtype
    column = reshape(bb, a, [1, *dims(a)]) if a.ty.ndim == 1 else a
    row = reshape(bb, b, [*dims(b), 1]) if b.ty.ndim == 1 else b
    g = _with_matrix_axes(bb, g, a, b)
    column, row = cast(bb, column, wide), cast(bb, row, wide)
    da = bb.emit(R.matmul(g, _transposed(bb, row)))
    db = _weight_gradient(bb, column, row, g)
    return [_like(bb, da, column, a), _like(bb, db, row, b)]


def _with_matrix_axes(bb: Builder, g: Expr, a: Expr, b: Expr) -> Expr:
    shape = dims(g)
    if b.ty.ndim == 1:
        shape = [*shape, 1]
    if a.ty.ndim == 1:
        shape = [*shape[:-1], 1, shape[-1]]
    return reshape(bb, g, shape)


def _weight_gradient(bb: Builder, a: Expr, b: Expr, g: Expr) -> Expr:
    """aᵀ g; for a weight b (k, n) one product over all rows, not a sum of one per batch."""
    if b.ty.ndim == 2 and a.ty.ndim > 2:
        rows = product(dims(a)[:-1])
        if isinstance(rows, tirx.IntImm | tirx.Var):
            a = reshape(bb, a, [rows, dims(a)[-1]])
            g = reshape(bb, g, [rows, dims(g)[-1]])
    return bb.emit(R.matmul(_transposed(bb, a), g))


def _transposed(bb: Builder, x: Expr) -> Expr:
    """`x` with its last two axes swapped; where that undoes a transpose, what was transposed."""
    n = x.ty.ndim
    axes = [*range(n - 2), n - 1, n - 2]
    made = bb.lookup_binding(x) if isinstance(x, relax.Var) else None
    if isinstance(made, relax.Call) and made.op == Op.get("relax.permute_dims"):
        before = made.attrs.axes
        if (list(map(int, before)) if before else list(range(n))[::-1]) == axes:
            return made.args[0]
    return bb.emit(R.permute_dims(x, axes))


def _like(bb: Builder, partial: Expr, matrix: Expr, arg: Expr) -> Expr:
    partial = sum_to(bb, partial, matrix)
    return cast(bb, reshape(bb, partial, dims(arg)), arg.ty.dtype)


@gradient("outer")
def _outer(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    x, y = call.args
    return [R.matmul(g, y), R.matmul(x, g)]


@gradient("einsum")
def _einsum(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """Each operand's partial is an einsum of the gradient and the other operands."""
    inputs, _, output = str(call.attrs.subscripts).replace(" ", "").partition("->")
    terms, operands = inputs.split(","), list(call.args[0])
    return [
        relax.Tuple(
            [_einsum_partial(bb, terms, operands, output, i, g) for i in range(len(operands))]
        )
    ]


def _einsum_partial(
    bb: Builder, terms: list[str], operands: list[Expr], output: str, i: int, g: Expr
) -> Expr:
    term, others = terms[i], [j for j in range(len(terms)) if j != i]
    known = set(output).union(*(terms[j] for j in others))
    if not output or "." in "".join(terms) or len(set(term)) < len(term):
        raise ValueError("write the einsum with ->, without ... and without a repeated index")
    kept = "".join(index for index in term if index in known)
    subscripts = ",".join([output, *(terms[j] for j in others)]) + "->" + kept
    partial = bb.emit(R.einsum([g, *(operands[j] for j in others)], subscripts))
    shape = dims(operands[i])
    lone = [axis for axis, index in enumerate(term) if index not in known]
    if lone:
        partial = bb.emit(R.expand_dims(partial, lone))
    return bb.emit(R.broadcast_to(partial, relax.ShapeExpr(shape)))

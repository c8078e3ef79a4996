"""One straight line of bindings from a function that calls others."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import IRModule, relax
from tvm.ir import Op
from tvm.relax.expr_functor import PyExprMutator, mutator

_NEEDS_DECOMPOSING = "relax.nn.batch_norm"


def straight_line(mod: IRModule, name: str) -> IRModule:
    """`name` with every Relax function that it calls inlined, public or private, and the kernels.

    Bindings are in dataflow blocks as far as they can be. A call back into a function that is being
    inlined stays. Batch norms are written out, with the statistics of the batch.
    """
    kernels = {gv: f for gv, f in mod.functions.items() if not isinstance(f, relax.Function)}
    mod = relax.transform.ToNonDataflow()(mod)  # a callee's bindings may land in either block
    func = _Inliner(mod, name).visit_expr(mod[name])
    func = relax.Function(func.params, func.body, None, func.is_pure, func.attrs)
    flat = IRModule({**kernels, mod.get_global_var(name): func})
    flat = relax.transform.ConvertToDataflow(min_size=1)(relax.transform.Normalize()(flat))
    if _holds(flat[name], _NEEDS_DECOMPOSING):
        flat = relax.transform.DecomposeOpsForTraining(name)(flat)
    return flat


@mutator
class _Inliner(PyExprMutator):
    """TVM's InlinePrivateFunctions leaves the callee's variables in shape expressions."""

    def __init__(self, mod: IRModule, name: str) -> None:
        super().__init__(mod)
        self.mod, self.inside = mod, [name]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, relax.GlobalVar) or call.op.name_hint in self.inside:
            return call
        callee = self.mod[call.op.name_hint]
        if not isinstance(callee, relax.Function):
            return call
        self.inside.append(call.op.name_hint)
        result = self.inline(_with_shapes(callee, call.args), call.args)
        self.inside.pop()
        return result

    def inline(self, callee: relax.Function, args: list[relax.Expr]) -> relax.Expr:
        for param, arg in zip(callee.params, args, strict=True):
            self.set_var_remap(param, arg if isinstance(arg, relax.Var) else self.bound(arg))
        for block in callee.body.blocks:
            for binding in block.bindings:
                self.visit_binding(binding)
        return self.visit_expr(callee.body.body)

    def bound(self, arg: relax.Expr) -> relax.Var:
        return self.builder_.emit(arg)


def _with_shapes(func: relax.Function, args: list[relax.Expr]) -> relax.Function:
    """A copy of `func` whose shape variables are the lengths of `args`."""
    copy = relax.utils.copy_with_new_vars(func)
    lengths: dict = {}
    for param, arg in zip(copy.params, args, strict=True):
        for old, new in _lengths(param.ty, arg.ty):
            if isinstance(old, tvm.tirx.Var) and not old.same_as(new):
                lengths.setdefault(old, new)
    return copy.bind_symbolic_vars(lengths) if lengths else copy


def _lengths(param: tvm.ir.Type, arg: tvm.ir.Type) -> Iterator[tuple]:
    if isinstance(param, relax.TupleType):
        for a, b in zip(param.fields, arg.fields, strict=True):
            yield from _lengths(a, b)
    elif isinstance(param, relax.TensorType):
        if isinstance(param.shape, relax.ShapeExpr) and isinstance(arg.shape, relax.ShapeExpr):
            yield from zip(param.shape, arg.shape, strict=True)
    elif isinstance(param, relax.ShapeType) and param.values and arg.values:
        yield from zip(param.values, arg.values, strict=True)


def fresh_shapes(func: relax.Function) -> relax.Function:
    """A copy with variables of its own, also in shapes: two functions may share none."""
    copy = relax.utils.copy_with_new_vars(func)
    old = relax.analysis.defined_symbolic_vars(copy)
    return copy.bind_symbolic_vars({v: tvm.tirx.Var(v.name, "int64") for v in old}) if old else copy


def _holds(func: relax.Function, op: str) -> bool:
    found: list = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and expr.op == Op.get(op):
            found.append(expr)

    relax.analysis.post_order_visit(func, visit)
    return bool(found)

"""Inline what a Relax function calls.

TVM's InlinePrivateFunctions leaves the callee's shape variables in shape expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import tvm
from tvm import IRModule, relax
from tvm.ir import BaseFunc
from tvm.relax.expr_functor import PyExprMutator, mutator


def inline_calls(mod: IRModule, name: str, callees: Set[str]) -> IRModule:
    """`name` with its calls of Relax functions in `callees` inlined, and the kernels of `mod`.

    Bindings are in dataflow blocks as far as they can be. A call back into a function that is being
    inlined stays.
    """
    kernels = {gv: f for gv, f in mod.functions.items() if not isinstance(f, relax.Function)}
    mod = relax.transform.ToNonDataflow()(mod)  # a callee's bindings may land in either block
    func = _Inliner(mod, name, callees).visit_expr(mod[name])
    func = relax.Function(func.params, func.body, None, func.is_pure, func.attrs)
    flat = IRModule({**kernels, mod.get_global_var(name): func})
    return relax.transform.ConvertToDataflow(min_size=1)(relax.transform.Normalize()(flat))


def called(functions: Iterable[BaseFunc]) -> set[str]:
    """Names of the functions that these Relax functions refer to."""
    relax_functions = (func for func in functions if isinstance(func, relax.Function))
    refs = (relax.analysis.all_global_vars(func) for func in relax_functions)
    return {gvar.name_hint for found in refs for gvar in found}


def called_from(mod: IRModule, roots: Set[str]) -> set[str]:
    """Names of the functions that `roots` call, and those that these call."""
    reached: set[str] = set()
    todo = set(roots)
    while todo:
        todo = called(mod[name] for name in todo) - reached
        reached |= todo
    return reached


@mutator
class _Inliner(PyExprMutator):
    def __init__(self, mod: IRModule, name: str, callees: Set[str]) -> None:
        super().__init__(mod)
        self.mod, self.callees, self.inside = mod, callees, [name]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        name = call.op.name_hint if isinstance(call.op, relax.GlobalVar) else ""
        if name not in self.callees or name in self.inside:
            return call
        self.inside.append(name)
        result = self.inline(_with_shapes(self.mod[name], call.args), call.args)
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

"""Names that code generators for C can write. Runs before kernels take them over."""

from __future__ import annotations

import re

import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from ._map_functions import map_functions


@tvm.transform.module_pass(opt_level=0, name="NameVariables")
class NameVariables:
    """Rename variables that are no identifiers of C, ``0.weight`` of a Sequential to ``_0_weight``.

    Kernels call their arguments after them, and TVM's generators of CUDA and C write any name as
    it is, except for dots. Two variables may get one name: generators number them.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        def renamed(_name: str, func: relax.Function) -> relax.Function:
            right = all(var.name == identifier(var.name) for var in relax.analysis.all_vars(func))
            return func if right else _Renamer(mod).visit_expr(func)

        return map_functions(mod, renamed)


def identifier(name: str) -> str:
    """`name` with an underscore for each character that an identifier of C cannot have there."""
    return re.sub(r"^(?=\d)", "_", re.sub(r"\W", "_", name, flags=re.ASCII))


@mutator
class _Renamer(PyExprMutator):
    def visit_var_def_(self, var: relax.Var) -> relax.Var:
        return self._renamed(var, relax.Var)

    def visit_dataflow_var_def_(self, var: relax.DataflowVar) -> relax.Var:
        return self._renamed(var, relax.DataflowVar)

    def _renamed(self, var: relax.Var, kind: type[relax.Var]) -> relax.Var:
        name = identifier(var.name)
        return var if name == var.name else kind(name, var.ty, var.span)

"""One straight line of bindings from a function that calls others."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir import Op

from relax_passes._inlining import inline_calls

_NEEDS_DECOMPOSING = "relax.nn.batch_norm"


def straight_line(mod: IRModule, name: str) -> IRModule:
    """`name` with every Relax function that it calls inlined, public or private, and the kernels.

    Batch norms are written out, with the statistics of the batch.
    """
    functions = {gv.name_hint for gv, f in mod.functions.items() if isinstance(f, relax.Function)}
    flat = inline_calls(mod, name, functions)
    if _holds(flat[name], _NEEDS_DECOMPOSING):
        flat = relax.transform.DecomposeOpsForTraining(name)(flat)
    return flat


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

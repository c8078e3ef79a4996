"""What a function says of its symbolic dimensions."""

from __future__ import annotations

from tvm import relax
from tvm.sym import Analyzer, ConstIntBound


def bounded_analyzer(func: relax.Function) -> Analyzer:
    """An analyzer that knows the bounds of the function's shape variables; at least 0."""
    attrs = func.attrs or {}
    lower, upper = (attrs.get(f"tir_var_{side}_bound", {}) for side in ("lower", "upper"))
    analyzer = Analyzer()
    for var in relax.analysis.defined_symbolic_vars(func):
        low = int(lower[var.name]) if var.name in lower else 0
        high = int(upper[var.name]) if var.name in upper else ConstIntBound.POS_INF
        analyzer.update(var, ConstIntBound(low, high))
    return analyzer

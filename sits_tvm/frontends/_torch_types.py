"""Torch's shapes, dtypes and tensors as Relax has them. Imports torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter


class Types:
    """Relax types for the tensors of one exported program.

    Attributes
    ----------
    symbols : dict of str to tirx.Var
        The variable of each torch symbol, such as "s27".
    """

    def __init__(self) -> None:
        self.symbols: dict[str, tirx.Var] = {}

    def of(self, tensor: torch.Tensor) -> relax.TensorType:
        shape = [self.dim(d) for d in tensor.shape]
        return relax.TensorType(shape, BaseFXGraphImporter._convert_data_type(tensor.dtype))

    def dim(self, value: int | torch.SymInt) -> int | tirx.Expr:
        """A torch dimension as an int or a symbolic int64."""
        expr = value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(int(value))
        found = self._sympy(expr)
        return int(found) if isinstance(found, tirx.IntImm) else found

    def _sympy(self, expr: sympy.Expr) -> tirx.Expr:
        if isinstance(expr, sympy.Integer):
            return tirx.IntImm("int64", int(expr))
        if isinstance(expr, sympy.Symbol):
            return self.symbols.setdefault(str(expr), tirx.Var(str(expr), "int64"))
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return self._sympy(sympy.Mul(*[expr.base] * int(expr.exp), evaluate=False))
        combine = _SYMPY.get(type(expr).__name__)
        if combine is None:
            raise NotImplementedError(f"a dimension of the form {expr}")
        return tvm.sym.Analyzer().simplify(reduce(combine, map(self._sympy, expr.args)))


def same_shape(have: Any, want: Any) -> bool:
    prove = tvm.sym.Analyzer().can_prove_equal
    return len(have) == len(want) and all(prove(a, b) for a, b in zip(have, want, strict=True))


def shapes_differ(have: Any, want: Any) -> bool:
    if not isinstance(have, relax.ShapeExpr):
        return False
    if len(have) != len(want):
        return True
    pairs = zip(have, want, strict=True)
    return any(
        isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm) and int(a) != int(b)
        for a, b in pairs
    )


def to_tvm(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """The tensor on the CPU, without a copy where it is compact and aligned to 64 bytes."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.data_ptr() % 64:
        tensor = tensor.clone()
    return tvm.runtime.from_dlpack(tensor)


_SYMPY: dict[str, Callable] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": tirx.floordiv,
    "CleanDiv": tirx.floordiv,
    "CeilDiv": tirx.ceildiv,
    "Mod": tirx.floormod,
    "PythonMod": tirx.floormod,
    "Max": tirx.max,
    "Min": tirx.min,
}

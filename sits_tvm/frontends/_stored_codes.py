"""Weights whose 4-bit codes a file holds: they replace the float weights of an imported model.

The module then dequantizes codes, which a build packs as they are (`PackFakeQuantizedWeights`).
Where a file groups columns in an order of its own, codes are in that order, and a product takes
the columns of its activations in it, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.runtime import Tensor

from relax_passes.op.fake_quantize import dequantize
from relax_passes.packed_weights.stored_codes import StoredCodes
from relax_passes.packed_weights.weight_sites import MATMUL, bindings_of, trace_weight

from ..diagnostics import Diagnostic, raise_errors


def nibbles(words: np.ndarray) -> np.ndarray:
    """Integers (..., n) of b bytes as values 0…15, uint8 (..., 2 b n), low nibble first."""
    octets = np.ascontiguousarray(words).view("uint8")
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)


def with_stored_codes(
    mod: IRModule, params: Mapping[str, Tensor], stored: Mapping[str, StoredCodes]
) -> tuple[IRModule, dict[str, Tensor]]:
    """`mod` and `params` with codes, scales and zero points for the float weights of these names.

    Raises
    ------
    SitsError
        With every weight that the model does not have in this shape.
    """
    raise_errors(list(_mismatches(params, stored)))
    if not stored:
        return mod, dict(params)
    main = _Replacer(mod, stored).replace(mod["main"])
    out = mod.clone()
    out["main"] = main
    values: dict[str, Tensor] = {}
    for name, value in params.items():
        if name in stored:
            parts = stored[name].parts.items()
            values |= {name + s: tvm.runtime.tensor(np.ascontiguousarray(a)) for s, a in parts}
        else:
            values[name] = value
    return out, values


def _mismatches(
    params: Mapping[str, Tensor], stored: Mapping[str, StoredCodes]
) -> list[Diagnostic]:
    found = []
    for name, weight in stored.items():
        want = tuple(params[name].shape) if name in params else "no such weight"
        if want != weight.codes.shape:
            message = f"the file has 4-bit codes {weight.codes.shape} of `{name}`; the model {want}"
            help_ = "check that config.json belongs to these weights"
            found.append(Diagnostic.error("weights-incomplete", message, help=help_))
    return found


@mutator
class _Replacer(PyExprMutator):
    def __init__(self, mod: IRModule, stored: Mapping[str, StoredCodes]) -> None:
        super().__init__(mod)
        self.stored = stored
        self.parts: dict[relax.Var, list[relax.Var]] = {}
        self.bound: dict[relax.Var, relax.Expr] = {}

    def replace(self, func: relax.Function) -> relax.Function:
        self.bound = {binding.var: binding.value for binding in bindings_of(func.body)}
        arguments = []
        for argument in func.params:
            parts = [argument]
            if argument.name in self.stored:
                parts = self.parts[argument] = _variables(argument, self.stored[argument.name])
            arguments += parts
        body = self.visit_expr(func).body
        new = relax.Function(arguments, body, func.ret_ty, func.is_pure, func.attrs)
        return relax.analysis.remove_all_unused(new)

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        if var not in self.parts:
            return super().visit_var_(var)
        made, columns = self._dequantized(var), self.stored[var.name].columns
        if columns is not None:
            made = self.builder_.emit(_columns_of(made, np.argsort(columns)))
        return made

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """A product with a weight whose columns have an order of their own takes them in it."""
        weight = self._plain_weight(call.args[1]) if call.op == MATMUL else None
        ordered = None if weight is None else self.stored[weight.name].columns
        if weight is None or ordered is None:
            return super().visit_call_(call)
        x = self.builder_.emit(_columns_of(self.visit_expr(call.args[0]), ordered))
        turned = self.builder_.emit(relax.op.permute_dims(self._dequantized(weight)))
        return relax.Call(call.op, [x, turned], call.attrs)

    def _plain_weight(self, operand: relax.Expr) -> relax.Var | None:
        """The weight of which `operand` is the transpose, not cast."""
        weight, flipped, through = trace_weight(operand, self.bound)
        if not isinstance(weight, relax.Var) or weight not in self.parts:
            return None
        same_dtype = weight.ty.dtype == operand.ty.dtype
        return weight if flipped and not through and same_dtype else None

    def _dequantized(self, var: relax.Var) -> relax.Var:
        weight = self.stored[var.name]
        call = dequantize(
            *self.parts[var],
            signed=weight.zero_point is None,
            group_size=weight.group_size,
            out_dtype=str(var.ty.dtype),
        )
        return self.builder_.emit(call, var.name)


def _columns_of(x: relax.Expr, order: np.ndarray) -> relax.Call:
    return relax.op.take(x, relax.const(order, "int64"), axis=x.ty.ndim - 1)


def _variables(argument: relax.Var, weight: StoredCodes) -> list[relax.Var]:
    return [
        relax.Var(argument.name + suffix, relax.TensorType(array.shape, str(array.dtype)))
        for suffix, array in weight.parts.items()
    ]

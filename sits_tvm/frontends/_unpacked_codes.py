"""Weights that a module unpacks from integers by itself: `R.sits.dequantize` of the same codes.

A weight operand that is computed from constants and parameters alone is evaluated here, in NumPy,
with one difference: what is cast from integers of 4 bits to floats stays apart as codes, with the
zero point that is subtracted from them and the scale that multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.runtime import Tensor

from relax_passes._values import Values
from relax_passes.op.fake_quantize import dequantize
from relax_passes.packed_weights.weight_sites import bindings_of
from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.frontends._code_arrays import (
    ARITHMETIC,
    ON_BITS,
    Codes,
    NotCodes,
    arithmetic,
    cast,
    concat,
    move_of,
    stored_codes,
)


def with_unpacked_codes(
    mod: IRModule, params: dict[str, Tensor]
) -> tuple[relax.Function, dict[str, Tensor]]:
    """`main` and its parameters, with codes for the weights that it unpacks by itself.

    They are constants where it unpacks constants, else parameters under the first name that it
    reads. A note says why where a weight is unpacked in another way.
    """
    main = mod["main"]
    evaluator = _Evaluator(main, params)
    found: dict[relax.Var, relax.Expr] = {}
    for weight in _unpacked_weights(main):
        made = evaluator.dequantized(weight)
        found |= {} if made is None else {weight: made}
    if not found:
        return main, params
    new = evaluator.made
    body = _Replacer(mod, found).visit_expr(main).body
    arguments = [*main.params, *(variable for variable, _ in new.values())]
    draft = relax.Function(arguments, body, main.ret_ty, main.is_pure, main.attrs)
    draft = relax.analysis.remove_all_unused(draft)
    read = {*relax.analysis.free_vars(draft.body), *evaluator.inputs}
    kept = [a for a in arguments if a in read]
    values = {**params, **{name: tvm.runtime.tensor(array) for name, (_, array) in new.items()}}
    out = relax.Function(kept, draft.body, draft.ret_ty, draft.is_pure, draft.attrs)
    return out, {a.name: values[a.name] for a in kept if a not in evaluator.inputs}


def _unpacked_weights(main: relax.Function) -> list[relax.Var]:
    """Right operands of products that are computed of weights alone, with an op on their bits."""
    static = set(main.params[int(main.attrs["num_input"]) :])
    unpacked: set[relax.Var] = set()
    found: dict[relax.Var, bool] = {}
    for binding in bindings_of(main.body):
        value, reads = binding.value, set(relax.analysis.free_vars(binding.value))
        call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
        name = value.op.name.removeprefix("relax.") if call else ""
        if name == "matmul" and value.args[1] in unpacked:
            found[value.args[1]] = True
        if reads <= static and not isinstance(value, relax.If):
            static.add(binding.var)
            if reads & unpacked or (name in ON_BITS and _is_integer(value)):
                unpacked.add(binding.var)
    return list(found)


class _Evaluator:
    def __init__(self, main: relax.Function, params: Mapping[str, Tensor]) -> None:
        self.values, self.params = Values(main), params
        self.inputs = set(main.params[: int(main.attrs["num_input"])])
        self.known: dict[relax.Expr, np.ndarray | Codes] = {}
        self.read: list[str] = []  # names of parameters
        self.made: dict[str, tuple[relax.Var, np.ndarray]] = {}

    def dequantized(self, weight: relax.Var) -> relax.Expr | None:
        """The weight (k, n) as a transpose of what codes (n, k) stand for."""
        self.read.clear()
        self.known.clear()
        try:
            stored = stored_codes(self.value(weight))
        except NotCodes as reason:
            message = f"`{weight.name}` is unpacked from integers, and stays in float: {reason}"
            where = {"function": "main", "binding": weight.name}
            emit(Diagnostic.note("codes-not-recognised", message, **where))
            return None
        name = next(iter(self.read), None)
        name = name and f"{name}.unpacked"
        name = f"{name}.{weight.name}" if name in self.made else name
        parts = [self._part(name, suffix, array) for suffix, array in stored.parts.items()]
        signed, dtype = stored.zero_point is None, str(weight.ty.dtype)
        call = dequantize(*parts, signed=signed, group_size=stored.group_size, out_dtype=dtype)
        return relax.op.permute_dims(call)

    def _part(self, name: str | None, suffix: str, array: np.ndarray) -> relax.Expr:
        """A constant, or, with a name, a new parameter."""
        if name is None:
            return relax.const(array)
        variable = relax.Var(name + suffix, relax.TensorType(array.shape, str(array.dtype)))
        self.made[variable.name] = variable, array
        return variable

    def value(self, expr: relax.Expr) -> np.ndarray | Codes:
        if expr not in self.known:
            self.known[expr] = self._value(expr)
        return self.known[expr]

    def _value(self, expr: relax.Expr) -> np.ndarray | Codes:
        value = self.values.of(expr)
        if isinstance(value, GenericConst):
            return value.value.numpy()
        if isinstance(value, relax.Var) and value.name in self.params and value not in self.inputs:
            self.read.append(value.name)
            return self.params[value.name].numpy()
        name, call = self.values.call(value)
        if call is None:
            raise NotCodes("it is not computed by ops alone")
        if name == "concat":
            return concat([self.value(f) for f in self.values.of(call.args[0]).fields], call)
        args = [self.value(a) for a in call.args if isinstance(a.ty, relax.TensorType)]
        if name == "astype":
            return cast(args[0], str(call.ty.dtype))
        if name in ARITHMETIC:
            return arithmetic(name, *args)
        if name in ON_BITS and not any(isinstance(a, Codes) for a in args):
            return ON_BITS[name](*args).astype(str(call.ty.dtype))
        move = move_of(name, call)
        return args[0].moved(move) if isinstance(args[0], Codes) else move(args[0])


def _is_integer(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and "int" in str(expr.ty.dtype)


@mutator
class _Replacer(PyExprMutator):
    def __init__(self, mod: IRModule, made: Mapping[relax.Var, relax.Expr]) -> None:
        super().__init__(mod)
        self.made = made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.made:
            binding = relax.VarBinding(binding.var, self.made[binding.var])
        super().visit_var_binding_(binding)

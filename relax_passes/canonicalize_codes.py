"""Weights that a module unpacks from integers by itself become `R.sits.dequantize` of their codes.
Runs before PackFakeQuantizedWeights.

A weight that is computed from constants and parameters alone is evaluated here, in NumPy, with one
difference: what is cast from integers of 4 bits to floats stays apart as codes, with the zero point
that is subtracted from them and the scale that multiplies them. Leaves alone, with a note, what
does not end in such codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.runtime import Tensor

from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import Report, SkippedWeight

from ._inlining import called
from ._values import Values, static_shape
from .op.fake_quantize import dequantize
from .packed_weights.code_arrays import ON_BITS, Array, NotCodes, apply, stored_codes
from .packed_weights.stored_codes import StoredCodes
from .packed_weights.weight_sites import MATMUL, TAKE, argument_names, bindings_of, weights_of

Params = Mapping[str, Tensor | np.ndarray]


def canonicalize_codes(
    mod: IRModule, params: Params, *, report: Report | None = None
) -> tuple[IRModule, dict[str, Tensor | np.ndarray]]:
    """Dequantize the codes of weights that a module unpacks by itself.

    ``matmul(x, permute_dims((astype(bitwise_and(w, 15), "float32") - 8) * scale))``, or in whatever
    way ops compute it, becomes ``matmul(x, permute_dims(R.sits.dequantize(codes, scale)))``. Codes,
    scales and zero points are the module's; what it rounds to half precision on the way, (code -
    zero) * scale, is not rounded.

    What the ops compute has to be (code - zero) * scale with one scale, and at most one zero point,
    per output channel or per group of 32, 64 or 128 columns. Codes that are arguments need their
    values in `params`; constants do not.

    Parameters
    ----------
    mod : IRModule
        Not changed.
    params : mapping of str to tensor
        Values of the arguments after ``num_input``, by name.
    report : Report, optional
        Gets a row in `skipped` per weight that stays in float.

    Returns
    -------
    mod : IRModule
    params : dict
        Codes, scales and zero points of what was computed of parameters are new ones, called after
        the first of these, ``<name>.unpacked``; what no function takes any more is left out. Of
        constants they are constants.
    """
    out, values, callees = mod, dict(params), called(mod.functions.values())
    for gvar, func in mod.functions_items():
        if isinstance(func, relax.Function):
            known = {} if gvar.name_hint in callees else values  # its arguments stay as they are
            new, made = _canonicalized(gvar.name_hint, func, mod, known, report or Report())
            values |= made
            if not new.same_as(func):
                out = mod.clone() if out.same_as(mod) else out
                out[gvar.name_hint] = new
    if out.same_as(mod):
        return mod, values
    gone = argument_names(mod) - argument_names(out)
    return relax.transform.Normalize()(out), {n: v for n, v in values.items() if n not in gone}


def _canonicalized(
    name: str, func: relax.Function, mod: IRModule, params: Params, report: Report
) -> tuple[relax.Function, dict[str, np.ndarray]]:
    """The function, and the parameters that it takes for the first time."""
    weights = weights_of(func)
    wanted = _unpacked_weights(func, weights)
    if not wanted:
        return func, {}
    evaluator = _Evaluator(name, func, weights, params, report)
    found: dict[relax.Var, relax.Expr] = {}
    for weight, transposed in wanted.items():
        made = evaluator.dequantized(weight, transposed)
        found |= {} if made is None else {weight: made}
    if not found:
        return func, {}
    body = _Replacer(mod, found).visit_expr(func).body
    arguments = [*func.params, *evaluator.variables.values()]
    new = relax.Function(arguments, body, None, bool(func.is_pure), func.attrs)
    new = relax.analysis.remove_all_unused(new)
    read = set(relax.analysis.free_vars(new.body))
    kept = [a for a in arguments if a in read or a not in evaluator.taken]
    return relax.Function(kept, new.body, None, bool(func.is_pure), func.attrs), evaluator.made


def _unpacked_weights(func: relax.Function, weights: set[relax.Var]) -> dict[relax.Var, bool]:
    """Matrices of products and lookups that are computed of integer weights alone; whether they are
    read as (k, n)."""
    static, unpacked, found = set(weights), set[relax.Var](), dict[relax.Var, bool]()
    for binding in bindings_of(func.body):
        value, reads = binding.value, set(relax.analysis.free_vars(binding.value))
        call = isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op)
        if call and value.op == MATMUL and value.args[1] in unpacked:
            found[value.args[1]] = True
        elif call and value.op == TAKE and value.args[0] in unpacked and not reads <= static:
            if value.attrs["axis"] == 0:
                found.setdefault(value.args[0], False)
        elif reads <= static and not isinstance(value, relax.If):
            static.add(binding.var)
            if reads & unpacked or (call and _reads_integers(value)):
                unpacked.add(binding.var)
    return found


def _reads_integers(call: relax.Call) -> bool:
    """Whether `call` works on the bits of its operands, or makes a float matrix of integers."""
    name = call.op.name.removeprefix("relax.")
    if name in ("astype", "dequantize", "call_tir"):
        read = relax.analysis.free_vars(call) or call.args[:1]
        is_matrix = sum(extent > 1 for extent in static_shape(call) or ()) > 1  # else positions
        return is_matrix and any(map(_is_integer, read)) and not _is_integer(call)
    return name in ON_BITS and _is_integer(call)


def _is_integer(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType) and "int" in str(expr.ty.dtype)


class _Evaluator:
    """Makes codes of the weights of one function.

    Attributes
    ----------
    made : dict of str to array
        New parameters that no function before took, and `variables` all new arguments, by name.
    taken : set of Var
        The arguments that were evaluated.
    """

    def __init__(
        self,
        name: str,
        func: relax.Function,
        weights: set[relax.Var],
        params: Params,
        report: Report,
    ) -> None:
        self.function, self.bindings, self.params = name, Values(func), params
        self.weights, self.report = weights, report
        self.made: dict[str, np.ndarray] = {}
        self.variables: dict[str, relax.Var] = {}
        self.taken: set[relax.Var] = set()
        self._known: dict[relax.Expr, Any] = {}
        self._uses: Counter[relax.Expr] = Counter()
        self._first = ""

    def dequantized(self, weight: relax.Var, transposed: bool) -> relax.Expr | None:
        """What a weight stands for, (n, k); None where it is of no codes, as a note says."""
        self._known, self._uses, self._first = {}, Counter(), ""
        taken, self.taken = self.taken, set()
        try:
            self._count(weight)
            value = self._value(weight)
            stored = stored_codes(_transposed(value) if transposed else value)
        except NotCodes as reason:
            self.taken = taken
            self._note(weight, str(reason))
            return None
        self.taken |= taken
        name = self._name(stored, weight)
        parts = [self._part(name, suffix, array) for suffix, array in stored.parts.items()]
        signed, dtype = stored.zero_point is None, str(weight.ty.dtype)
        call = dequantize(*parts, signed=signed, group_size=stored.group_size, out_dtype=dtype)
        return relax.op.permute_dims(call) if transposed else call

    def _note(self, weight: relax.Var, reason: str) -> None:
        code = "codes-not-recognised"
        message = f"`{weight.name}` is computed of integers, and stays in float: {reason}"
        emit(Diagnostic.note(code, message, function=self.function, binding=weight.name))
        name = self._first or f"constant of {weight.name}"
        row = SkippedWeight(self.function, weight.name, name, f"{code}: {reason}")
        self.report.skipped.append(row)

    def _name(self, stored: StoredCodes, weight: relax.Var) -> str | None:
        """Of new parameters; None for constants. Functions share what is equal."""
        if not self._first:
            return None
        name = f"{self._first}.unpacked"
        while any(
            not np.array_equal(_array(value), array)
            for suffix, array in stored.parts.items()
            for value in [{**self.params, **self.made}.get(name + suffix)]
            if value is not None
        ):
            name += f".{weight.name}"
        return name

    def _part(self, name: str | None, suffix: str, array: np.ndarray) -> relax.Expr:
        """A constant, or, with a name, a parameter."""
        if name is None:
            return relax.const(array)
        full = name + suffix
        if full not in self.params:
            self.made[full] = array
        ty = relax.TensorType(array.shape, str(array.dtype))
        return self.variables.setdefault(full, relax.Var(full, ty))

    def _count(self, expr: relax.Expr) -> None:
        """How often each value is read: it is kept for so long."""
        value = self.bindings.of(expr)
        self._uses[value] += 1
        if self._uses[value] == 1 and isinstance(value, relax.Call):
            for operand in _tensors(value, self.bindings):
                self._count(operand)

    def _value(self, expr: relax.Expr) -> Array:
        value = self.bindings.of(expr)
        if value not in self._known:
            self._known[value] = self._computed(value)
        self._uses[value] -= 1
        return self._known[value] if self._uses[value] else self._known.pop(value)

    def _computed(self, value: relax.Expr) -> Array:
        if isinstance(value, GenericConst):
            return value.value.numpy()
        if value in self.weights:
            self._first = self._first or value.name
            if value.name not in self.params:
                raise NotCodes(f"the value of `{value.name}` is not known; give it in params")
            self.taken.add(value)
            return _array(self.params[value.name])
        name, call = self.bindings.call(value)
        if call is None:
            raise NotCodes("it is not computed by ops alone")
        args: list[Any] = [self._value(operand) for operand in _tensors(call, self.bindings)]
        return apply(name, call, [args] if name in ("concat", "stack") else args)


def _tensors(call: relax.Call, bindings: Values) -> list[relax.Expr]:
    """The tensors that a call reads, those of a tuple too."""
    found: list[relax.Expr] = []
    for arg in map(bindings.of, call.args):
        fields = arg.fields if isinstance(arg, relax.Tuple) else [arg]
        found += [f for f in fields if isinstance(f.ty, relax.TensorType)]
    return found


def _transposed(value: Array) -> Array:
    return value.T if isinstance(value, np.ndarray) else value.moved(np.transpose)


def _array(value: Tensor | np.ndarray) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.numpy()


@mutator
class _Replacer(PyExprMutator):
    def __init__(self, mod: IRModule, made: Mapping[relax.Var, relax.Expr]) -> None:
        super().__init__(mod)
        self.made = made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.made:
            binding = relax.VarBinding(binding.var, self.made[binding.var])
        super().visit_var_binding_(binding)

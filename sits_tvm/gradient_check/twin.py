"""A Relax function in float64 PyTorch, read from its forward IR, for autograd to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, StringImm

from relax_passes._adjoint import bindings_of
from relax_passes.lower_attention import LowerAttention
from relax_passes.normalize_negative_indices import NormalizeNegativeIndices
from tir_schedules.tir_nodes import substitute

from ..diagnostics import Diagnostic, SitsError
from ..optional_packages import require
from . import _twin_arithmetic, _twin_layers, _twin_quantize, _twin_shapes
from ._torch_values import as_point, perturbed, to_torch

RULES = {
    f"relax.{name}": rule
    for module in (_twin_arithmetic, _twin_layers, _twin_quantize, _twin_shapes)
    for name, rule in module.RULES.items()
}
_KINKS = {
    f"relax.{name}"
    for name in [
        "sits.fake_quantize",
        "sits.quantize",
        "sits.absmax_scale",
        "quantize",
        "round",
        "floor",
        "ceil",
        "trunc",
        "clip",
        "astype",
        "sign",
        "abs",
        "maximum",
        "minimum",
        "equal",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "nn.relu",
        "nn.leakyrelu",
    ]
}
QUANTIZERS = {f"relax.{name}" for name in _twin_quantize.QUANTIZERS}
Points = Mapping[tuple[int, int], Any]
Watch = Callable[[int, Sequence[Any]], None]


@dataclass(frozen=True)
class Site:
    """An op whose derivative jumps, so that the twin must decide at the compiled values."""

    binding: relax.VarBinding

    @property
    def call(self) -> relax.Call:
        return self.binding.value

    @property
    def is_quantizer(self) -> bool:
        return self.call.op.name in QUANTIZERS


@dataclass(frozen=True)
class TwinRun:
    """Outputs, nested lists of tensors; of each quantize op its value and where it clips."""

    outputs: Any
    quantized: dict[int, Any]
    clipped: dict[int, Any]


def sites_of(bindings: Sequence[relax.Binding]) -> list[Site]:
    """The ops with a jump, in order."""
    return [Site(binding) for binding in bindings if _is_kink(binding)]


class Twin:
    """Interprets the function `name` of `mod` in float64.

    Raises
    ------
    SitsError
        If PyTorch is missing, or with every op that has no rule, by function and binding.
    """

    def __init__(self, mod: IRModule, name: str) -> None:
        require("torch", "the float64 reference of a gradient check", "hf")
        mod = tvm.transform.Sequential([NormalizeNegativeIndices(), LowerAttention()])(mod)
        self.name = name
        self.function: relax.Function = mod[name]
        self.bindings = bindings_of(self.function)
        self.sites = sites_of(self.bindings)
        self._site_index = {site.binding.var: i for i, site in enumerate(self.sites)}
        self._require_rules()

    def run(
        self,
        args: Sequence[Any],
        points: Points | None = None,
        *,
        noise: Any = None,
        watch: Watch | None = None,
    ) -> TwinRun:
        """Evaluate on torch tensors, one per parameter, floats in float64.

        Parameters
        ----------
        points : mapping of (site, argument) to array, optional
            Arguments of the ops in `sites` as a compiled function saw them. An argument that is
            missing is taken from the twin, rounded to its dtype.
        noise : torch.Generator, optional
            Displace every value and every gradient by up to half a unit of the dtype of its
            variable, at random: what any implementation in that precision has.
        watch : (index of a site, its arguments) -> None, optional
            Called where an op in `sites` decides.
        """
        return _Evaluation(self, args, points or {}, noise, watch).run()

    def _require_rules(self) -> None:
        missing = [
            _no_reference(self.name, binding)
            for binding in self.bindings
            if isinstance(binding.value, relax.Call) and _op_name(binding.value) not in RULES
        ]
        if missing:
            raise SitsError(missing)


def _no_reference(function: str, binding: relax.Binding, why: str = "") -> Diagnostic:
    message = f"the float64 reference has no rule for {_op_name(binding.value)}{why}"
    where = {"function": function, "binding": binding.var.name, "ir": str(binding)}
    help_ = "compare this function with another reference, such as PyTorch"
    return Diagnostic.error("no-reference", message, help=help_, **where)


class _Evaluation:
    def __init__(
        self,
        twin: Twin,
        args: Sequence[Any],
        points: Points,
        noise: Any,
        watch: Watch | None,
    ) -> None:
        self.twin, self.points, self.noise, self.watch = twin, points, noise, watch
        self.values: dict[relax.Var, Any] = {}
        self.extents: dict[tirx.Var, Any] = {}
        self.quantized: dict[int, Any] = {}
        self.clipped: dict[int, Any] = {}
        for param, arg in zip(twin.function.params, args, strict=True):
            self._bind(param, arg)

    def run(self) -> TwinRun:
        for binding in self.twin.bindings:
            self._bind(binding.var, self._binding_value(binding))
        return TwinRun(self._value(self.twin.function.body.body), self.quantized, self.clipped)

    def _binding_value(self, binding: relax.Binding) -> Any:
        if not isinstance(binding.value, relax.Call):
            return self._value(binding.value)
        call = binding.value
        args = [self._value(arg) for arg in call.args]
        index = self.twin._site_index.get(binding.var)
        at = args if index is None else self._points(index, call, args)
        if self.watch is not None and index is not None:
            self.watch(index, at)
        value = self._apply_rule(binding, args, at)
        if call.op.name in QUANTIZERS and index is not None:
            self.quantized[index] = value.detach()
            self.clipped[index] = _twin_quantize.clipped(call, args, at)
        return value if self.noise is None else perturbed(value, binding.var.ty, self.noise)

    def _apply_rule(self, binding: relax.Binding, args: list[Any], at: list[Any]) -> Any:
        call = binding.value
        try:
            return RULES[call.op.name](call, args, at)
        except NotImplementedError as error:  # a form of the op
            raise SitsError([_no_reference(self.twin.name, binding, f": {error}")]) from error

    def _points(self, index: int, call: relax.Call, args: Sequence[Any]) -> list[Any]:
        return [
            as_point(self.points.get((index, position), arg), expr)
            for position, (arg, expr) in enumerate(zip(args, call.args, strict=True))
        ]

    def _bind(self, var: relax.Var, value: Any) -> None:
        self.values[var] = value
        shape = getattr(var.ty, "shape", None)
        if isinstance(shape, relax.ShapeExpr):
            for extent, size in zip(shape, value.shape, strict=True):
                if isinstance(extent, tirx.Var):
                    self.extents.setdefault(extent, tirx.const(int(size), "int64"))

    def _value(self, expr: Any) -> Any:
        if isinstance(expr, relax.Var) and expr in self.values:
            return self.values[expr]
        if isinstance(expr, relax.Tuple):
            return [self._value(field) for field in expr.fields]
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.ShapeExpr):
            return [self._number(extent) for extent in expr]
        if isinstance(expr, GenericConst):
            return to_torch(expr.value.numpy())
        return str(expr.value) if isinstance(expr, StringImm) else self._number(expr)

    def _number(self, expr: Any) -> int | float:
        if isinstance(expr, tirx.FloatImm):
            return float(expr)
        if not isinstance(expr, tirx.IntImm):
            expr = tvm.sym.Analyzer().simplify(substitute(expr, self.extents))
        return int(expr)


def _is_kink(binding: relax.Binding) -> bool:
    call = binding.value
    if not isinstance(call, relax.Call) or _op_name(call) not in _KINKS:
        return False
    is_float = any("float" in str(getattr(arg.ty, "dtype", "")) for arg in call.args)
    return is_float and not (call.op.name == "relax.astype" and "float" in str(call.ty.dtype))


def _op_name(call: relax.Call) -> str:
    return str(getattr(call.op, "name", "") or getattr(call.op, "name_hint", "a call"))

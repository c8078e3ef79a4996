"""Rewrite a Relax function to fake-quantize its weights, and activations, before each product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import IRModule
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.op import absmax_scale, fake_quantize
from relax_passes.packed_weights.weight_sites import WeightSite
from tir_schedules.int4_format.packed_layout import PackedLayout

from ..config import QuantSpec


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight to be fake-quantized; learned: `parameters` are its scale and zero point."""

    spec: QuantSpec
    site: WeightSite
    parameters: tuple[relax.Var, ...]

    @classmethod
    def of(cls, site: WeightSite, spec: QuantSpec, prefix: str, *, learned: bool) -> Any:
        groups = PackedLayout(*site.shape, spec).groups
        shape = (groups, site.shape[0]) if site.transposed else (site.shape[0], groups)
        names = ("scale",) if spec.symmetric else ("scale", "zero_point")
        types = relax.TensorType(shape, "float32")
        variables = tuple(relax.Var(f"{prefix}.{name}", types) for name in names)
        return cls(spec, site, variables if learned else ())

    @property
    def axis(self) -> int:
        """That of the input channels in the weight as it is stored."""
        return 0 if self.site.transposed else 1

    def emit(self, bb: relax.BlockBuilder, weight: relax.Expr) -> relax.Var:
        spec = self.spec
        form: dict[str, Any] = {
            "bits": spec.bits,
            "axis": self.axis,
            "group_size": spec.group_size,
            "scale_dtype": spec.scale_dtype,
        }
        parameters: Sequence[relax.Expr] = self.parameters
        if not parameters:
            made = bb.emit(absmax_scale(weight, symmetric=spec.symmetric, **form))
            parameters = [made] if spec.symmetric else [bb.emit(made[i]) for i in (0, 1)]
        quantized = fake_quantize(weight, *parameters, signed=spec.symmetric, **form)
        return bb.emit(quantized, f"{self.site.name}.fake_quantized")


def fake_quantized(
    mod: IRModule,
    func: relax.Function,
    weights: Sequence[tuple[WeightSite, QuantizedWeight]],
    parameters: Sequence[relax.Var],
    position: int,
    activation: str | None,
) -> relax.Function:
    """`func` with `parameters` among its arguments at `position` and fake-quantized products."""
    sites = {site.binding: (site, made) for site, made in weights}
    inserter = _Inserter(mod, sites, activation)
    body = inserter.visit_expr(func).body
    arguments = [*func.params[:position], *parameters, *func.params[position:]]
    out = relax.Function(arguments, body, func.ret_ty, func.is_pure, func.attrs)
    return relax.analysis.remove_all_unused(out)


@mutator
class _Inserter(PyExprMutator):
    def __init__(
        self,
        mod: IRModule,
        sites: dict[relax.Var, tuple[WeightSite, QuantizedWeight]],
        activation: str | None,
    ) -> None:
        super().__init__(mod)
        self.sites, self.activation = sites, activation
        self.made: dict[Any, relax.Var] = {}  # in the block that is visited

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        outer, self.made = self.made, {}
        out = super().visit_dataflow_block_(block)
        self.made = outer
        return out

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        outer, self.made = self.made, {}
        out = super().visit_binding_block_(block)
        self.made = outer
        return out

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.sites:
            call = self._product(binding.value, *self.sites[binding.var])
            binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)

    def _product(self, call: relax.Call, site: WeightSite, weight: QuantizedWeight) -> relax.Call:
        """`call` reading the fake-quantized weight; its other operand as it was, or quantized."""
        read = self._once(site.packing, lambda: weight.emit(self.builder_, site.source))
        if site.kind == "embedding":
            return relax.Call(call.op, [read, *call.args[1:]], call.attrs)
        if not site.transposed:
            read = self._once(("turned", site.packing), lambda: self._emit(R.permute_dims(read)))
        dtype = str(call.args[1].ty.dtype)
        if str(read.ty.dtype) != dtype:
            read = self._emit(R.astype(read, dtype))
        x = call.args[0]
        if self.activation is not None:
            x = self._once(x, lambda: self._activation(self.visit_expr(x)))
        return relax.Call(call.op, [x, read], call.attrs)

    def _activation(self, x: relax.Expr) -> relax.Var:
        """Symmetric, one scale per token: of int8 amax / 127 of the last axis, of int4 amax / 7."""
        bits = {"int8": 8, "int4": 4}[str(self.activation)]
        scale = self._emit(absmax_scale(x, bits=bits, axis=-1, group_size=-1))
        return self._emit(fake_quantize(x, scale, bits=bits, axis=-1, group_size=-1))

    def _once(self, key: Any, make: Callable[[], relax.Var]) -> relax.Var:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _emit(self, value: relax.Expr) -> relax.Var:
        return self.builder_.emit(value)

"""A Relax function with packed INT4 weights for arguments, and the function that makes them."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.config import QuantSpec
from tir_schedules.packing import PackedLayout, pack

from ._weight_sites import WeightSite, weights_of
from .op.int4 import int4_matmul, int4_take, layout_attrs, packed_types, quantize_weight

TRANSFORM_SUFFIX = "_transform_params"
SOURCE_NAMES = "sits.param_names"
"""Attribute of a transform function: the names of the weights it takes."""


def with_packed_arguments(
    func: relax.Function, rewriter: Quantizer
) -> tuple[relax.Function, relax.Function | None]:
    """`func` taking packed parts in place of its quantized weights, and how they are made."""
    body = rewriter.visit_expr(func).body  # of the whole function: its shape variables are in scope
    sources = {source for source, _ in rewriter.parts}
    parts = [p for _, packed in rewriter.parts.values() for p in packed if isinstance(p, relax.Var)]
    draft = relax.Function([*func.params, *parts], body, func.ret_ty, func.is_pure, func.attrs)
    body = relax.analysis.remove_all_unused(draft).body
    used = set(relax.analysis.free_vars(body))
    arguments: list[relax.Var] = []
    for argument in func.params:
        if argument not in sources or argument in used:
            arguments.append(argument)
        for _, packed in rewriter.packings(argument):
            arguments += packed
    out = relax.Function(arguments, body, func.ret_ty, func.is_pure, func.attrs)
    weights = weights_of(func)
    ordered = [argument for argument in func.params if argument in weights]
    name = str(func.attrs["global_symbol"]) + TRANSFORM_SUFFIX
    return out, _transform_params(name, ordered, used, rewriter) if parts else None


def _transform_params(
    name: str, weights: list[relax.Var], used: set[relax.Var], rewriter: Quantizer
) -> relax.Function:
    """The function from the original weights to the packed and untouched ones, in order."""
    bb = relax.BlockBuilder()
    argument = relax.Var("params", relax.TupleType([weight.ty for weight in weights]))
    with bb.function(name, [argument]):
        with bb.dataflow():
            fields = []
            for i, weight in enumerate(weights):
                source = bb.emit(relax.TupleGetItem(argument, i), weight.name)
                packings = rewriter.packings(weight)
                if not packings or weight in used:
                    fields.append(source)
                for site, parts in packings:
                    packed = bb.emit(rewriter.quantize(site, source))
                    fields += [bb.emit(relax.TupleGetItem(packed, j)) for j in range(len(parts))]
            result = bb.emit_output(relax.Tuple(fields))
        bb.emit_func_output(result)
    return bb.get()[name].with_attr(SOURCE_NAMES, [weight.name for weight in weights])


@mutator
class Quantizer(PyExprMutator):
    """Rewrites the calls of one function; `parts` holds the packed parts of each weight."""

    def __init__(
        self,
        mod: IRModule,
        spec: QuantSpec,
        lanes: int,
        sites: list[WeightSite],
        both_ways: set[str],
    ) -> None:
        super().__init__(mod)
        self.spec, self.lanes, self.both_ways = spec, lanes, both_ways
        self.sites = {site.binding: site for site in sites}
        self.parts: dict[tuple[relax.Expr, bool], tuple[WeightSite, list[relax.Expr]]] = {}
        for site in sites:
            if site.packing not in self.parts:
                self.parts[site.packing] = site, self._make_parts(site)

    def packings(self, source: relax.Expr) -> list[tuple[WeightSite, list[relax.Expr]]]:
        """The parts of a weight: one set for each way in which it is read."""
        keys = ((source, transposed) for transposed in (False, True))
        return [self.parts[key] for key in keys if key in self.parts]

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        site = self.sites.get(binding.var)
        if site is None:
            super().visit_var_binding_(binding)
            return
        value = self.builder_.normalize(self._quantized_call(site))
        self.set_var_remap(binding.var, self._emit(binding, value))

    def _emit(self, binding: relax.VarBinding, value: relax.Expr) -> relax.Var:
        inside = self.builder_.current_block_is_dataflow()
        if isinstance(binding.var, relax.DataflowVar) or not inside:
            return self.builder_.emit(value, binding.var.name)
        return self.builder_.emit_output(value, binding.var.name)

    def _quantized_call(self, site: WeightSite) -> relax.Expr:
        attrs = layout_attrs(self.layout(site))
        packed = self.parts[site.packing][1]
        operands = [self.visit_expr(arg) for arg in site.call.args]
        if site.kind == "embedding":
            return int4_take(operands[1], *packed, out_dtype=str(site.call.ty.dtype), **attrs)
        x, dtype = operands[0], str(site.call.ty.dtype)
        if str(x.ty.dtype) != dtype:
            x = self.builder_.emit(relax.op.astype(x, dtype))
        return int4_matmul(x, *packed, **attrs)

    def layout(self, site: WeightSite) -> PackedLayout:
        return PackedLayout(*site.shape, self.spec, self.lanes)

    def quantize(self, site: WeightSite, weight: relax.Expr) -> relax.Call:
        return quantize_weight(
            weight,
            transposed=site.transposed,
            scale_method=self.spec.scale_method,
            **layout_attrs(self.layout(site)),
        )

    def _make_parts(self, site: WeightSite) -> list[relax.Expr]:
        if isinstance(site.source, GenericConst):
            return [relax.const(part) for part in pack(_rows(site), self.spec, self.lanes)]
        layout = self.layout(site)
        turned = site.transposed and site.name in self.both_ways
        prefix = f"{site.name}.transposed" if turned else site.name
        named = zip(layout.names, packed_types(layout), strict=True)
        return [relax.Var(f"{prefix}.{part}", ty) for part, ty in named]


def _rows(site: WeightSite) -> np.ndarray:
    weight = site.source.value.numpy()
    return weight.T if site.transposed else weight

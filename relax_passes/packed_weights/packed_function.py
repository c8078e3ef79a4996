"""A Relax function with packed INT4 weights for arguments, and the function that makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tir_schedules.int4_format.packing import PackedLayout, Parts

from ..op.columns import columns
from ..op.int4 import int4_matmul, int4_take, layout_attrs, packed_types
from .weight_sites import weights_of

TRANSFORM_SUFFIX = "_transform_params"
SOURCE_NAMES = "sits.param_names"
"""Attribute of a transform function: the names of the weights it takes."""


@dataclass(frozen=True, eq=False)
class Packing:
    """How the parts of a weight are made.

    `sources` are the arguments or constants that the parts are computed from, the weight first;
    `call` makes the call that does it, of these or what stands for them, and `evaluate` does it
    in NumPy where all are constants. `prefix` is that of the names of the parts. Where products
    of one input share a call, `columns` has by binding the first of its own, and how many.
    """

    sources: tuple[relax.Expr, ...]
    layout: PackedLayout
    prefix: str
    call: Callable[..., relax.Call]
    evaluate: Callable[..., Parts]
    columns: Mapping[relax.Var, tuple[int, int]] = field(default_factory=dict)

    @property
    def owner(self) -> relax.Var | None:
        """The argument whose place the parts take; None where they are constants."""
        return next((s for s in self.sources if isinstance(s, relax.Var)), None)

    def make_parts(self) -> list[relax.Expr]:
        if self.owner is None:
            arrays = [source.value.numpy() for source in self.sources]
            return [relax.const(part) for part in self.evaluate(*arrays)]
        named = zip(self.layout.names, packed_types(self.layout), strict=True)
        return [relax.Var(f"{self.prefix}.{part}", ty) for part, ty in named]


class PackedCall(Protocol):
    """A call that reads a weight: what `WeightSite` and `FakeQuantizedSite` have in common."""

    @property
    def binding(self) -> relax.Var: ...
    @property
    def call(self) -> relax.Call: ...
    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...


def with_packed_arguments(
    func: relax.Function, rewriter: Packer
) -> tuple[relax.Function, relax.Function | None]:
    """`func` taking packed parts in place of its packed weights, and how they are made."""
    body = rewriter.visit_expr(func).body  # of the whole function: its shape variables are in scope
    sources = {source for packing in rewriter.parts for source in packing.sources}
    parts = [p for packed in rewriter.parts.values() for p in packed if isinstance(p, relax.Var)]
    draft = relax.Function([*func.params, *parts], body, func.ret_ty, func.is_pure, func.attrs)
    body = relax.analysis.remove_all_unused(draft).body
    used = set(relax.analysis.free_vars(body))
    kept = [argument not in sources or argument in used for argument in func.params]
    arguments: list[relax.Var] = []
    for argument, keep in zip(func.params, kept, strict=True):
        arguments += [argument] if keep else []
        for packing in rewriter.packings_of(argument):
            arguments += rewriter.parts[packing]
    out = relax.Function(arguments, body, func.ret_ty, func.is_pure, func.attrs)
    weights = weights_of(func)
    ordered = {a: k for a, k in zip(func.params, kept, strict=True) if a in weights}
    name = str(func.attrs["global_symbol"]) + TRANSFORM_SUFFIX
    return out, _transform_params(name, ordered, rewriter) if parts else None


def _transform_params(
    name: str, weights: dict[relax.Var, bool], rewriter: Packer
) -> relax.Function:
    """The function from the original weights to the packed and (if True) kept ones, in order."""
    bb = relax.BlockBuilder()
    argument = relax.Var("params", relax.TupleType([weight.ty for weight in weights]))
    with bb.function(name, [argument]):
        with bb.dataflow():
            values: dict[relax.Expr, relax.Expr] = {}
            for i, weight in enumerate(weights):
                values[weight] = bb.emit(relax.TupleGetItem(argument, i), weight.name)
            fields = []
            for weight, keep in weights.items():
                fields += [values[weight]] if keep else []
                for packing in rewriter.packings_of(weight):
                    packed = bb.emit(packing.call(*(values.get(s, s) for s in packing.sources)))
                    count = len(packing.layout.names)
                    fields += [bb.emit(relax.TupleGetItem(packed, j)) for j in range(count)]
            result = bb.emit_output(relax.Tuple(fields))
        bb.emit_func_output(result)
    return bb.get()[name].with_attr(SOURCE_NAMES, [weight.name for weight in weights])


@mutator
class Packer(PyExprMutator):
    """Rewrites the calls of one function; `parts` holds what each `Packing` makes."""

    def __init__(self, mod: IRModule, packings: Sequence[tuple[PackedCall, Packing]]) -> None:
        super().__init__(mod)
        self.sites = {site.binding: (site, packing) for site, packing in packings}
        distinct = dict.fromkeys(packing for _, packing in packings)
        self.parts = {packing: packing.make_parts() for packing in distinct}
        self._shared: dict[Packing, relax.Var] = {}

    def packings_of(self, argument: relax.Var) -> list[Packing]:
        """Those whose parts take the place of `argument`: one for each way in which it is read."""
        return [packing for packing in self.parts if packing.owner == argument]

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var not in self.sites:
            super().visit_var_binding_(binding)
            return
        value = self.builder_.normalize(self._packed_call(*self.sites[binding.var]))
        self.set_var_remap(binding.var, self._emit(binding, value))

    def _emit(self, binding: relax.VarBinding, value: relax.Expr) -> relax.Var:
        inside = self.builder_.current_block_is_dataflow()
        if isinstance(binding.var, relax.DataflowVar) or not inside:
            return self.builder_.emit(value, binding.var.name)
        return self.builder_.emit_output(value, binding.var.name)

    def _packed_call(self, site: PackedCall, packing: Packing) -> relax.Expr:
        attrs = layout_attrs(packing.layout)
        packed = self.parts[packing]
        operands = [self.visit_expr(arg) for arg in site.call.args]
        if site.kind == "embedding":
            return int4_take(operands[1], *packed, out_dtype=str(site.call.ty.dtype), **attrs)
        x, dtype = operands[0], str(site.call.ty.dtype)
        if str(x.ty.dtype) != dtype:
            x = self.builder_.emit(relax.op.astype(x, dtype))
        if not packing.columns:
            return int4_matmul(x, *packed, **attrs)
        if packing not in self._shared:
            self._shared[packing] = self.builder_.emit(int4_matmul(x, *packed, **attrs))
        first, count = packing.columns[site.binding]
        return columns(self._shared[packing], first=first, count=count)

"""Store the weights of matrix products in INT4. Runs before LegalizeOps, on graph-level ops.

Leaves alone, with a note: weights on the left, weights that are sliced or otherwise computed before
the product, batched weights, bfloat16, what `Config.skip` names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, IRModule
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.config import Config, QuantSpec
from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import QuantizedWeight, Report, SkippedWeight
from tir_schedules.packing import PackedLayout, pack

from ._weight_sites import WeightSite, find_weight_sites, weights_of
from .op.int4 import int4_matmul, int4_take, layout_attrs, packed_types, quantize_weight

TRANSFORM_SUFFIX = "_transform_params"
_CALLED = ("function-is-called", "another function calls this one; make it private: it is inlined")
SOURCE_NAMES = "sits.param_names"
"""Attribute of a transform function: the names of the weights it takes."""


@tvm.transform.module_pass(opt_level=0, name="QuantizeMatmulWeights")
class QuantizeMatmulWeights:
    """Replace ``matmul(x, permute_dims(W))`` by a product with packed INT4 parts of W.

    The parts take the place of W among the arguments of the function; how they come from W is the
    function ``<func>_transform_params``, which takes and returns the arguments after the inputs.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor(("s", 64), "float32"), w: R.Tensor((32, 64), "float32")):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    wt = R.permute_dims(w)
                    y = R.matmul(x, wt)
                    R.output(y)
                return y

    After, for ``Config(quant=QuantSpec(group_size=32))``::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor(("s", 64), "float32"),
                w_codes: R.Tensor((32, 8, 1), "uint32"),
                w_scale: R.Tensor((32, 2, 1), "float16"),
            ):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    y = R.sits.int4_matmul(
                        x, w_codes, w_scale, n=32, k=64, lanes=1,
                        bits=4, group_size=32, symmetric=True, scale_dtype="float16",
                    )
                    R.output(y)
                return y

            @R.function
            def main_transform_params(params: R.Tuple(R.Tensor((32, 64), "float32"))):
                R.func_attr({"sits.param_names": ["w"]})
                with R.dataflow():
                    w = params[0]
                    packed = R.sits.quantize_weight(
                        w, n=32, k=64, lanes=1, bits=4, group_size=32, symmetric=True,
                        scale_dtype="float16", scale_method="absmax", transposed=False,
                    )
                    w_codes = packed[0]
                    w_scale = packed[1]
                    out = (w_codes, w_scale)
                    R.output(out)
                return out

    Parameters
    ----------
    config : Config
        `quant` must be set; `quantize_embedding`, `quantize_head` and `skip` are read.
    lanes : int
        Order of the packed weights that the target's kernels read, see `tir_schedules.packing`.
    report : Report, optional
        Receives `quantized` and `skipped`.
    """

    def __init__(
        self,
        config: Config,
        *,
        lanes: int = 1,
        report: Report | None = None,
    ) -> None:
        if config.quant is None:
            raise ValueError("QuantizeMatmulWeights needs Config.quant, for example QuantSpec()")
        self.config, self.spec, self.lanes = config, config.quant, lanes
        self.report = report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        out, chosen = mod.clone(), self._chosen(mod)
        both_ways = _read_both_ways(chosen)
        for gvar, sites in chosen.items():
            name = gvar.name_hint
            self._note(name, sites)
            rewriter = _Quantizer(mod, self.spec, self.lanes, sites, both_ways)
            out[gvar], transform = _with_packed_arguments(mod[gvar], rewriter)
            if transform is not None:
                _check_names(mod, name, out[gvar])
                out[name + TRANSFORM_SUFFIX] = transform
        return out

    def _chosen(self, mod: IRModule) -> dict[GlobalVar, list[WeightSite]]:
        """What to quantize in each function; an error where there is nothing."""
        skipped: list[str] = []
        called = _called_functions(mod)
        chosen: dict[GlobalVar, list[WeightSite]] = {}
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                name, sites = gvar.name_hint, find_weight_sites(func)
                if name in called:
                    sites = (replace(site, reason=site.reason or _CALLED) for site in sites)
                wanted = [site for site in sites if not self._skips(name, site, skipped)]
                chosen |= {gvar: wanted} if wanted else {}
        if not chosen:
            emit(_nothing_to_quantize(skipped))
        return chosen

    def _skips(self, function: str, site: WeightSite, skipped: list[str]) -> bool:
        reason = site.reason or self._unwanted(site)
        if reason is None:
            return False
        code, message = reason
        where = {"function": function, "binding": site.binding.name, "ir": str(site.call)}
        emit(Diagnostic.note(code, f"`{site.name}` stays in float: {message}", **where))
        row = SkippedWeight(function, site.binding.name, site.name, f"{code}: {message}")
        self.report.skipped.append(row)
        skipped.append(f"{function}, {site.binding.name}, {site.name}: {row.reason}")
        return True

    def _unwanted(self, site: WeightSite) -> tuple[str, str] | None:
        for glob in self.config.skip:
            if fnmatchcase(site.name, glob):
                return "skipped", f"Config.skip has {glob!r}"
        if site.kind == "embedding" and not self.config.quantize_embedding:
            return "embedding", "set Config.quantize_embedding to store embedding tables in INT4"
        if site.kind == "head" and not self.config.quantize_head:
            return "head", "set Config.quantize_head to quantize the projection onto the vocabulary"
        if PackedLayout(*site.shape, self.spec, self.lanes).nbytes >= _float_bytes(site):
            return "no-gain", f"packed, its {site.shape} values would take no fewer bytes"
        return None

    def _note(self, function: str, sites: list[WeightSite]) -> None:
        seen: set[tuple[relax.Expr, bool]] = set()
        for site in sites:
            if site.packing in seen:
                continue
            seen.add(site.packing)
            n, k = site.shape
            layout = PackedLayout(n, k, self.spec, self.lanes)
            row = QuantizedWeight(
                function, site.binding.name, site.name, str(self.spec), (n, k),
                _float_bytes(site), layout.nbytes,
            )  # fmt: skip
            self.report.quantized.append(row)


def _with_packed_arguments(
    func: relax.Function, rewriter: _Quantizer
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
    name: str, weights: list[relax.Var], used: set[relax.Var], rewriter: _Quantizer
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


def _nothing_to_quantize(skipped: list[str]) -> Diagnostic:
    found = "\n  ".join(["it found", *skipped]) if skipped else "it found no matrix product"
    return Diagnostic.error(
        "nothing-to-quantize",
        f"Config.quant is set, but no weight can be quantized; {found}",
        help="see each reason, or leave Config.quant out",
    )


def _called_functions(mod: IRModule) -> set[str]:
    """Names of the functions that others call: packed parts would change their arguments."""
    names: set[str] = set()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, GlobalVar):
            names.add(expr.op.name_hint)

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return names


def _check_names(mod: IRModule, name: str, func: relax.Function) -> None:
    """An error for each name that the pass makes and the module has already."""
    functions = [gvar.name_hint for gvar in mod.get_global_vars()]
    counts = Counter(argument.name for argument in func.params)
    counts[name + TRANSFORM_SUFFIX] = 1 + functions.count(name + TRANSFORM_SUFFIX)
    taken = [clash for clash, count in counts.items() if count > 1]
    for clash in taken:
        message = f"INT4 weights need the name `{clash}`, which {name} or another function has"
        emit(Diagnostic.error("name-taken", message, function=name, help="rename it"))


def _read_both_ways(chosen: Mapping[GlobalVar, list[WeightSite]]) -> set[str]:
    """Names of weights that are read as W[n, k] and as W[k, n]: they are packed twice."""
    ways = {(site.name, site.transposed) for sites in chosen.values() for site in sites}
    return {name for name, transposed in ways if (name, not transposed) in ways}


def _float_bytes(site: WeightSite) -> int:
    n, k = site.shape
    return n * k * tvm.DataType(str(site.source.ty.dtype)).bits // 8


@mutator
class _Quantizer(PyExprMutator):
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

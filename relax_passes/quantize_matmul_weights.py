"""Store the weights of matrix products in INT4. Runs before LegalizeOps, on graph-level ops.

Leaves alone, with a note: weights on the left, weights that are sliced or otherwise computed before
the product, batched weights, bfloat16, what `Config.skip` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GlobalVar, IRModule
from tvm.ir.transform import PassContext

from sits_tvm.config import Config
from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import QuantizedWeight, Report, SkippedWeight
from tir_schedules.packing import PackedLayout, Parts, pack

from ._packed_function import Packing
from ._packed_module import (
    FUNCTION_IS_CALLED,
    called_functions,
    pack_function,
    reads_packed_weights,
)
from ._weight_sites import WeightSite, find_weight_sites
from .op.int4 import layout_attrs, quantize_weight


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
            made = {site.packing: self._packing(site, both_ways) for site in sites}
            pack_function(out, gvar, [(site, made[site.packing]) for site in sites])
        return out

    def _packing(self, site: WeightSite, both_ways: set[str]) -> Packing:
        layout = PackedLayout(*site.shape, self.spec, self.lanes)
        turned = site.transposed and site.name in both_ways
        call = partial(
            quantize_weight,
            transposed=site.transposed,
            scale_method=self.spec.scale_method,
            **layout_attrs(layout),
        )

        def evaluate(weight: np.ndarray) -> Parts:
            return pack(weight.T if site.transposed else weight, self.spec, self.lanes)

        prefix = f"{site.name}.transposed" if turned else site.name
        return Packing((site.source,), layout, prefix, call, evaluate)

    def _chosen(self, mod: IRModule) -> dict[GlobalVar, list[WeightSite]]:
        """What to quantize in each function; an error where there is nothing."""
        skipped: list[str] = []
        called = called_functions(mod)
        chosen: dict[GlobalVar, list[WeightSite]] = {}
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function):
                name, sites = gvar.name_hint, find_weight_sites(func)
                if name in called:
                    sites = (
                        replace(site, reason=site.reason or FUNCTION_IS_CALLED) for site in sites
                    )
                wanted = [site for site in sites if not self._skips(name, site, skipped)]
                chosen |= {gvar: wanted} if wanted else {}
        if not chosen and not reads_packed_weights(mod):
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


def _nothing_to_quantize(skipped: list[str]) -> Diagnostic:
    found = "\n  ".join(["it found", *skipped]) if skipped else "it found no matrix product"
    return Diagnostic.error(
        "nothing-to-quantize",
        f"Config.quant is set, but no weight can be quantized; {found}",
        help="see each reason, or leave Config.quant out",
    )


def _read_both_ways(chosen: Mapping[GlobalVar, list[WeightSite]]) -> set[str]:
    """Names of weights that are read as W[n, k] and as W[k, n]: they are packed twice."""
    ways = {(site.name, site.transposed) for sites in chosen.values() for site in sites}
    return {name for name, transposed in ways if (name, not transposed) in ways}


def _float_bytes(site: WeightSite) -> int:
    n, k = site.shape
    return n * k * tvm.DataType(str(site.source.ty.dtype)).bits // 8

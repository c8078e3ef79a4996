"""Which weights of a module a `Config` wants in INT4, and why the others stay in float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import tvm
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, IRModule

from sits_tvm.config import Config
from sits_tvm.diagnostics import Diagnostic, emit
from sits_tvm.report import QuantizedWeight, Report, SkippedWeight
from tir_schedules.int4_format.packing import PackedLayout

from .._inlining import called
from .packed_function import PackedCall
from .packed_module import FUNCTION_IS_CALLED, reads_packed_weights
from .weight_sites import WeightSite, find_weight_sites


class WeightChoice:
    """Chooses among the matrix products and embeddings of a module.

    `report.skipped` and a note get every weight that stays in float, `report.quantized` the
    others. `only` are globs over names, one of which must match; `order` is that of the packing;
    `constants` tells whether weights that are constants may be chosen; `options` is what stands
    before the names of options in messages, "" where they are arguments of the caller.
    """

    def __init__(
        self,
        config: Config,
        report: Report,
        *,
        order: str = "rows",
        only: Sequence[str] = ("*",),
        constants: bool = True,
        options: str = "Config.",
    ) -> None:
        assert config.quant is not None
        self.config, self.spec, self.report = config, config.quant, report
        self.order, self.only, self.constants, self.options = order, only, constants, options

    def choose(
        self, mod: IRModule, functions: Sequence[str] | None = None
    ) -> dict[GlobalVar, list[WeightSite]]:
        """What to quantize in each function, or in those named; an error where there is nothing."""
        callees = called(mod.functions.values())
        chosen: dict[GlobalVar, list[WeightSite]] = {}
        for gvar, func in mod.functions_items():
            name = gvar.name_hint
            if not isinstance(func, relax.Function) or (functions and name not in functions):
                continue
            sites = list(find_weight_sites(func))
            if name in callees:
                sites = [replace(s, reason=s.reason or FUNCTION_IS_CALLED) for s in sites]
            wanted = [site for site in sites if not self._skips(name, site)]
            if wanted:
                chosen[gvar] = wanted
                self._note(name, wanted)
        if reads_packed_weights(mod):
            self._note_float_activations()
        elif not chosen:
            emit(self._nothing_to_quantize())
        return chosen

    def _note_float_activations(self) -> None:
        """`QuantSpec.activation` is of weights that are quantized here."""
        if self.spec.activation is not None:
            message = (
                f'QuantSpec.activation="{self.spec.activation}" is of weights that are quantized '
                "here; those whose codes the model has are multiplied with activations in float"
            )
            emit(Diagnostic.note("activation-stays-float", message))

    def _skips(self, function: str, site: WeightSite) -> bool:
        reason = site.reason or self._unwanted(site)
        if reason is None:
            return False
        note_skipped(self.report, function, site, reason)
        return True

    def _unwanted(self, site: WeightSite) -> tuple[str, str] | None:
        for glob in self.config.skip:
            if fnmatchcase(site.name, glob):
                return "skipped", f"{self.options}skip has {glob!r}"
        if not self.constants and isinstance(site.source, GenericConst):
            return "constant", "it cannot be trained; import the model with weights as parameters"
        if not any(fnmatchcase(site.name, glob) for glob in self.only):
            return "skipped", f"none of only={tuple(self.only)!r} matches"
        if site.kind == "embedding" and not self.config.quantize_embedding:
            option = f"{self.options}quantize_embedding"
            return "embedding", f"set {option} to store embedding tables in INT4"
        if site.kind == "head" and not self.config.quantize_head:
            option = f"{self.options}quantize_head"
            return "head", f"set {option} to quantize the projection onto the vocabulary"
        return self._no_gain(site)

    def _no_gain(self, site: WeightSite) -> tuple[str, str] | None:
        """Small weights, whose last group is mostly padding."""
        whole = replace(self.spec, group_size=-1)
        packed, least = (
            PackedLayout(*site.shape, spec, self.order).nbytes for spec in (self.spec, whole)
        )
        bytes_ = _float_bytes(site)
        if packed < bytes_:
            return None
        found = f"its {site.shape} values take {bytes_} bytes, and {packed} packed as {self.spec}"
        return "no-gain", found + f" (with group_size=-1, {least})" * (least < bytes_)

    def _nothing_to_quantize(self) -> Diagnostic:
        rows = self.report.skipped
        lines = [f"{row.function}, {row.binding}, {row.name}: {row.reason}" for row in rows]
        found = "\n  ".join(["it found", *lines]) if lines else _NO_PRODUCT
        message, help_ = f"no weight can be quantized; {found}", "see each reason"
        if self.options:
            message = f"{self.options}quant is set, but {message}"
            help_ += f", or leave {self.options}quant out"
        return Diagnostic.error("nothing-to-quantize", message, help=help_)

    def _note(self, function: str, sites: list[WeightSite]) -> None:
        first: dict[object, WeightSite] = {}
        for site in sites:
            first.setdefault(site.packing, site)
        for site in first.values():
            layout = PackedLayout(*site.shape, self.spec, self.order)
            row = QuantizedWeight(
                function, site.binding.name, site.name, str(self.spec), site.shape,
                _float_bytes(site), layout.nbytes,
            )  # fmt: skip
            self.report.quantized.append(row)


_NO_PRODUCT = "it found no product with a float weight (or fake-quantized ones only)"


def note_skipped(report: Report, function: str, site: PackedCall, reason: tuple[str, str]) -> None:
    """Say, in a note and in the report, why the weight of `site` stays in float."""
    code, message = reason
    where = {"function": function, "binding": site.binding.name, "ir": str(site.call)}
    emit(Diagnostic.note(code, f"`{site.name}` stays in float: {message}", **where))
    row = SkippedWeight(function, site.binding.name, site.name, f"{code}: {message}")
    report.skipped.append(row)


def read_both_ways(chosen: Mapping[GlobalVar, list[WeightSite]]) -> set[str]:
    """Names of weights that are read as W[n, k] and as W[k, n]: they are quantized twice."""
    ways = {(site.name, site.transposed) for sites in chosen.values() for site in sites}
    return {name for name, transposed in ways if (name, not transposed) in ways}


def _float_bytes(site: WeightSite) -> int:
    n, k = site.shape
    return n * k * tvm.DataType(str(site.source.ty.dtype)).bits // 8

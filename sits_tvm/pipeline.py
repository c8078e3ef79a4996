"""The order of the passes, for a `Config` and a target. Importing it registers the pipeline "sits".

Phase 1, graph passes, work on Relax ops: they make an imported module right and rewrite it.
Phase 2, kernel passes, turn ops into fused, scheduled PrimFuncs. Phase 3 is TVM's own for the
target: memory planning and lowering to VM calls.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import Pass, PassContext
from tvm.relax.ir.instrument import WellFormedInstrument
from tvm.runtime import Tensor
from tvm.target import Target

import relax_passes as passes
import tir_schedules
from relax_passes._name_variables import NameVariables

from ._pass_context import with_instruments
from .config import GRAPH_RULES, HEAD_RULES, INTEGER_ACTIVATIONS, Config
from .diagnostics import Diagnostic, SitsError, collect, raise_errors
from .gradient_check.gate import report_gate
from .host_run import Run, on_host
from .report import Kernel, PassRun, Report
from .rewrite_check import checked
from .target import parse_target, short_name

_LOG = logging.getLogger(__name__)
Params = dict[str, Tensor | np.ndarray]
"""Values of weights by name."""


def graph_passes(
    config: Config, target: Target, report: Report, params: Params | None = None
) -> list[Pass]:
    """Phase 1: from the user's module to the module we want to compile.

    Where `params` are given, redundant heads of attention are pruned and weights that are computed
    of codes found, and `params` updated.
    """
    _refuse_activations(config, target)
    quantize, order = [], tir_schedules.weight_order(target)
    if config.quant is not None:
        integers = config.quant.activation in INTEGER_ACTIVATIONS
        stack = integers and target.kind.name == "llvm"  # others gain none
        quantize = [passes.QuantizeMatmulWeights(config, order=order, stack=stack, report=report)]
    return [
        passes.UnpackInt4Constants(),
        passes.CheckSubByteBuffers(),
        passes.FixQuantizeGradient(report=report),
        *_gradient_check(config, report),
        passes.RemoveStopGradients(),
        passes.InlinePrivateFunctions(),
        *passes.IMPORT_FIXES,
        _on_weights("CanonicalizeCodes", partial(passes.canonicalize_codes, report=report), params),
        *_attention_passes(config, report),
        *_prune_heads(config, report, params),
        passes.PackFakeQuantizedWeights(order=order, report=report),
        *quantize,
    ]


def _refuse_activations(config: Config, target: Target) -> None:
    """Those without kernels for the target."""
    kind, activation = target.kind.name, config.quant and config.quant.activation
    if activation is None or kind == "llvm":
        return
    where = "llvm only"
    if activation in INTEGER_ACTIVATIONS:
        if kind == "cuda" and tir_schedules.weight_order(target) == "fragments":
            return
        where = "llvm and, from sm_80 on, cuda"
    name = short_name(target)
    message = f'QuantSpec.activation="{activation}" has kernels for {where}, not for {name}'
    help_ = "leave it None: weights in INT4, activations in float"
    raise SitsError([Diagnostic.error("activation-target", message, help=help_)])


def _attention_passes(config: Config, report: Report) -> list[Pass]:
    """`Config.attention`; with `Config.verify` each runs what it changed."""
    if config.attention == "off":
        return []
    rules = config.attention_rules & set(GRAPH_RULES)
    found = [
        passes.CanonicalizeAttention(report=report),
        passes.PruneRedundantAttention(rules, report=report),
    ]
    return [checked(p, run_on_host, report) for p in found] if config.verify else found


def _prune_heads(config: Config, report: Report, params: Params | None) -> list[Pass]:
    """`passes.prune_redundant_heads` as a pass, checked as the others."""
    rules = config.attention_rules & set(HEAD_RULES)
    if params is None or not rules:
        return []

    prune = _on_weights(
        "PruneRedundantHeads",
        partial(passes.prune_redundant_heads, rules=rules, report=report),
        params,
    )
    return [checked(prune, run_on_host, report, params) if config.verify else prune]


def _on_weights(
    name: str, rewrite: Callable[..., tuple[IRModule, Params]], params: Params | None
) -> Pass:
    """A function of a module and its weights as a pass, which writes to `params`."""

    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: IRModule, _ctx: PassContext) -> IRModule:
        changed, left = rewrite(mod, params or {})
        if params is not None:
            params.clear()
            params.update(left)
        return changed

    return run


def _gradient_check(config: Config, report: Report) -> list[Pass]:
    """`Config.gradient_gate`, before any op that has a gradient is replaced."""
    if config.gradient_gate == "off":
        return []

    def gate(mod: IRModule, name: str) -> list[Diagnostic]:
        return report_gate(mod, name, run_on_host, report)

    severity = "error" if config.gradient_gate == "fail" else "warning"
    return [passes.GradientConservationCheck(gate, severity=severity)]


def run_on_host(mod: IRModule) -> Run:
    """Compile all functions of a module for this CPU, by our kernels, without graph passes.

    Returns
    -------
    (name, arguments) -> nested lists of arrays
    """
    target = parse_target("llvm -mcpu=native")

    def compile_(mod: IRModule) -> relax.VMExecutable:
        fixed = _run("1_graph", passes.IMPORT_FIXES, mod, target, Config(), Report())
        lowered = run_kernel_passes(fixed, target, Config(), Report())
        return relax.build(lowered, target, relax_pipeline=lower_to_vm(target))

    return on_host(mod, compile_)


def kernel_passes(config: Config, target: Target, report: Report) -> list[Pass]:
    """Phase 2: from Relax ops to scheduled PrimFuncs."""
    return [
        *fusion_passes(config, target, report),
        tir_schedules.ApplyRecords(tir_schedules.RULES, config.database),
        *tir_schedules.scheduling_passes(target),
    ]


def fusion_passes(config: Config, target: Target, report: Report) -> list[Pass]:
    """The part of phase 2 that makes PrimFuncs, each a kernel without a schedule."""
    fuses = config.attention != "off"
    cuda = target.kind.name == "cuda"
    return [
        *([NameVariables()] if cuda else []),
        passes.BoundTakeIndices(),
        passes.BroadcastInfiniteFills(),
        passes.LowerAttention(target if fuses else None, report=report),
        passes.WidenBfloat16Ops(),
        passes.SplitSharedOperands(),
        relax.transform.FuseTransposeMatmul(),
        *_backend(target).library_dispatch_passes(target),
        relax.transform.LegalizeOps(),
        relax.transform.EliminateCommonSubexpr(),  # activations quantized once for q, k and v
        relax.transform.CanonicalizeBindings(),  # copies would hide consumers from fusion
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        passes.IsolateKernels(),
        relax.transform.FuseOps(),
        passes.InlineTupleAccess(),
        relax.transform.FuseTIR(),
        *([passes.StoreColumns()] if target.kind.name == "llvm" else []),
        relax.transform.RewriteDataflowReshape(),  # to views, before a schedule hides them
        relax.transform.DeadCodeElimination(),
        *([passes.BoundKernelExtents()] if cuda else []),
        passes.WidenHalfIntrinsics(),
        passes.CheckSubByteBuffers(),
    ]


def lower_to_vm(target: Target) -> Pass:
    """Phase 3: TVM's passes for the target that follow its legalization and fusion."""
    backend = _backend(target)
    passes_ = [*backend.dataflow_lower_passes(target), *backend.finalize_passes(target)]
    return tvm.transform.Sequential(passes_, name="lower_to_vm")


def _backend(target: Target) -> ModuleType:
    names = {"llvm": "cpu_generic", "cuda": "cuda", "rocm": "rocm"}
    name = names.get(target.kind.name, "gpu_generic")
    return importlib.import_module(f"tvm.relax.backend.{name}.pipeline")


def run_graph_passes(
    mod: IRModule, target: Target, config: Config, report: Report, params: Params | None = None
) -> IRModule:
    """Phase 1. Updates `params`; raises SitsError with every error that the passes emit."""
    graph = graph_passes(config, target, report, params)
    return _run("1_graph", graph, mod, target, config, report)


def run_kernel_passes(mod: IRModule, target: Target, config: Config, report: Report) -> IRModule:
    """Phase 2. Fills `report.kernels`; raises SitsError with every error that the passes emit."""
    mod = _run("2_kernels", kernel_passes(config, target, report), mod, target, config, report)
    report.kernels = [
        _kernel(gvar.name_hint, func)
        for gvar, func in mod.functions_items()
        if isinstance(func, tvm.tirx.PrimFunc)
    ]
    return mod


def run_fusion_passes(mod: IRModule, target: Target, config: Config, report: Report) -> IRModule:
    """Phase 2 short of schedules; raises SitsError with every error that the passes emit."""
    return _run("2_kernels", fusion_passes(config, target, report), mod, target, config, report)


def _kernel(name: str, func: tvm.tirx.PrimFunc) -> Kernel:
    rule = str(func.attrs.get("sits.rule", "none"))
    tuned = tir_schedules.tuned_rows(func)
    ranked = "tuned" if tuned else "fallback" if rule == "none" else "default"
    by, reason = tir_schedules.tuned_by(func), str(func.attrs.get(tir_schedules.REASON, ""))
    return Kernel(name, rule, ranked, tuned_rows=tuned, tuned_by=by, reason=reason)


def _run(
    phase: str,
    passes_: Sequence[Pass],
    mod: IRModule,
    target: Target,
    config: Config,
    report: Report,
) -> IRModule:
    """Run passes one by one, noting in `report` what each changed, found, and how long it took."""
    with collect() as found, target, _instruments(config, phase):
        for one in passes_:
            start, before = time.perf_counter(), mod
            name = str(one.info.name)
            _LOG.info("pass %s", name)
            try:
                mod = one(mod)
            except Exception as error:
                error.add_note(f"in the pass {name}")
                raise
            seconds = time.perf_counter() - start
            changed = not tvm_ffi.structural_equal(before, mod)
            report.passes.append(PassRun(name, changed, seconds))
    report.diagnostics += found
    raise_errors(found)
    return mod


def _instruments(config: Config, phase: str) -> PassContext:
    """`Config.verify` and `Config.dump_dir` (a folder per phase), by TVM's own instruments."""
    instruments = []
    if config.verify:
        instruments.append(WellFormedInstrument())
    if config.dump_dir is not None:
        folder = config.dump_dir / phase
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot write to Config.dump_dir: {error}"
            found = Diagnostic.error("dump-dir", message, help="give a folder, or a new name")
            raise SitsError([found]) from error
        instruments.append(tvm.ir.instrument.DumpIR(str(folder)))
    return with_instruments(*instruments)


@relax.register_pipeline("sits")
def sits_pipeline(config: Config | None = None, report: Report | None = None) -> Pass:
    """``relax_pipeline="sits"``: both phases and TVM's lowering, for `tvm.compile`.

    Parameters
    ----------
    config : Config, optional
    report : Report, optional
        Filled; without one the report goes to the log.
    """
    chosen = config if config is not None else Config()
    filled = report if report is not None else Report()

    @tvm.transform.module_pass(opt_level=0, name="sits")
    def sits(mod: IRModule, _ctx: PassContext) -> IRModule:
        target = Target.current(allow_none=False)
        filled.target = str(target)
        mod = run_graph_passes(mod, target, chosen, filled)
        mod = run_kernel_passes(mod, target, chosen, filled)
        if report is None:
            _LOG.info("%s", filled)
        return lower_to_vm(target)(mod)

    return sits

"""Apply schedule rules to every PrimFunc of a module."""

from __future__ import annotations

from contextlib import nullcontext

from tvm import s_tir, tirx
from tvm.ir import BaseFunc, IRModule
from tvm.ir.transform import PassContext, module_pass
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from sits_tvm.diagnostics import SitsError, emit
from sits_tvm.quick_parsing import quick_stack

from .empty_tensors import start_no_empty_grids

# TOpPattern kOpaque: FuseOps leaves calls of such a function alone.
_OPAQUE = 8


@module_pass(opt_level=0, name="ApplySchedules")
class ApplySchedules:
    """Give each PrimFunc the schedule of the first rule that takes it.

    Like dlight's `ApplyDefaultSchedule`, but the input module is not written to, and every
    function afterwards carries ``sits.rule``, the class name of the rule that took it ("Matmul";
    "dlight.Matmul" for one of TVM's) or "none", and is opaque to fusion: a second `FuseOps`, which
    TVM's default pipelines run, would otherwise merge scheduled functions with others. Functions
    already scheduled stay as they are. A kernel starts only if it has blocks.

    Parameters
    ----------
    *rules : ScheduleRule
        In order of preference.
    """

    def __init__(self, *rules: ScheduleRule) -> None:
        self.rules = rules

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        functions = {var: self._scheduled(func) for var, func in mod.functions_items()}
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _scheduled(self, func: BaseFunc) -> BaseFunc:
        if not isinstance(func, tirx.PrimFunc) or _is_scheduled(func):
            return func
        name, schedule = self._schedule(func, _target_of(func))
        if schedule is not None:
            func = start_no_empty_grids(schedule.mod["main"])
            func = func.with_attr("tirx.is_scheduled", True)
        return func.with_attr({"op_pattern": _OPAQUE, "sits.rule": name})

    def _schedule(self, func: tirx.PrimFunc, target: Target) -> tuple[str, s_tir.Schedule | None]:
        for rule in self.rules:
            try:
                with quick_stack() if _is_of_tvm(rule) else nullcontext():
                    schedule = rule.apply(func, target, False)
            except SitsError as error:  # would lose its class on its way out of the pass
                for diagnostic in error.diagnostics:
                    emit(diagnostic)
                break
            if schedule is not None:
                return _name(rule), schedule
        return "none", None


def _name(rule: ScheduleRule) -> str:
    name = type(rule).__name__
    return f"dlight.{name}" if _is_of_tvm(rule) else name


def _is_of_tvm(rule: ScheduleRule) -> bool:
    return type(rule).__module__.startswith("tvm.")


def _is_scheduled(func: tirx.PrimFunc) -> bool:
    return bool(func.attrs.get("tirx.is_scheduled", False))


def _target_of(func: tirx.PrimFunc) -> Target:
    target = func.attrs.get("target")
    return Target.current(allow_none=False) if target is None else target

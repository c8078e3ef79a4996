"""Give kernels the parameters that a tuning database has for them. Runs before ApplySchedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import BaseFunc, IRModule
from tvm.ir.transform import PassContext, module_pass
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from sits_tvm.diagnostics import Diagnostic, SitsError, emit

from .database import SHIPPED, Record, Records, arch_of, read_records
from .space import Space, TunableRule, with_parameters
from .workloads import Workload


@module_pass(opt_level=0, name="ApplyRecords")
class ApplyRecords:
    """Attach ``sits.parameters`` to each PrimFunc that a `TunableRule` takes and that has records.

    Each range of rows that a kernel has code for is looked up on its own. A record whose values or
    range of rows the rule no longer takes is left out, with a warning.

    Parameters
    ----------
    rules : sequence of ScheduleRule
        As for `ApplySchedules`.
    database : path, optional
        Looked up before the database that ships.
    """

    def __init__(self, rules: Sequence[ScheduleRule], database: Path | None = None) -> None:
        self.rules = [rule for rule in rules if isinstance(rule, TunableRule)]
        self.database = database

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        target = Target.current(allow_none=False)
        arch = arch_of(target)
        try:
            own = {} if self.database is None else _own_records(self.database, arch)
            records = {**read_records(SHIPPED, arch), **own}
        except SitsError as error:
            for diagnostic in error.diagnostics:
                emit(diagnostic)
            return mod
        functions = {
            var: self._with_records(func, target, own, records)
            for var, func in mod.functions_items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)

    def _with_records(
        self, func: BaseFunc, target: Target, own: Records, records: Records
    ) -> BaseFunc:
        if not isinstance(func, tirx.PrimFunc):
            return func
        for rule in self.rules:
            workload = rule.workload(func, target)
            if workload is None:
                continue
            spaces = rule.spaces(func, target)
            others = {rows for known, rows in own if known == workload} - spaces.keys()
            if others:
                _warn_of_other_rows(rule, workload, target, others)
            known = {
                rows: records[workload, rows] for rows in spaces if (workload, rows) in records
            }
            found = {
                rows: record.parameters
                for rows, record in known.items()
                if _fits(record, spaces[rows], partial(rule.fault, func, target, rows))
            }
            ranked = {record.ranked for rows, record in known.items() if rows in found}
            return with_parameters(func, found, ranked) if found else func
        return func


def _warn_of_other_rows(
    rule: TunableRule, workload: Workload, target: Target, others: set[str]
) -> None:
    """`others` are ranges of rows that a kernel does not have; one for any number has all."""
    every = rule.spaces(rule.prim_func(workload, None), target)
    for rows in sorted(others - every.keys()):
        _warn_outdated(workload, rows, f"there are no such rows, but {', '.join(every)}")


def _own_records(database: Path, arch: str) -> Records:
    if not database.is_dir():
        message = f"Config.database={database} is no folder"
        help_ = "give the folder that sits_tvm.tune returned"
        raise SitsError([Diagnostic.error("database-missing", message, help=help_)])
    own = read_records(database, arch)
    if not own:
        others = sorted(path.name for path in database.glob("*/") if _has_records(path))
        found = f"records of {', '.join(others)}" if others else "no records"
        message = f"Config.database={database} has none for {arch}: it holds {found}"
        emit(Diagnostic.warning("database-other-arch", message, help="tune for this target"))
    return own


def _has_records(folder: Path) -> bool:
    return any(path.stat().st_size for path in folder.glob("*.jsonl"))


def _fits(record: Record, space: Space, fault: Callable[[Any], str | None]) -> bool:
    try:
        found = fault(space.with_values(record.parameters))
    except ValueError as error:
        found = str(error)
    if found is not None:
        _warn_outdated(record.workload, record.rows, found)
    return found is None


def _warn_outdated(workload: Workload, rows: str, found: str) -> None:
    message = f"the record of {workload}, {rows} rows, is not used: {found}"
    emit(Diagnostic.warning("database-outdated", message, help="tune this kernel again"))

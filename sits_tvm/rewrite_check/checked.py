"""A pass that is compared with its input each time it runs."""

from __future__ import annotations

import tvm
from tvm import IRModule
from tvm.ir.transform import Pass, PassContext

from sits_tvm.diagnostics import emit
from sits_tvm.host_run import Compile
from sits_tvm.report import Report

from .check import check_rewrite, failure


def checked(pass_: Pass, compile_: Compile, report: Report) -> Pass:
    """`pass_`, whose name it keeps, and an error for each value that it changes.

    Rows go to `report.rewrite_checks`.
    """
    name = str(pass_.info.name)

    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: IRModule, _ctx: PassContext) -> IRModule:
        after = pass_(mod)
        rows = check_rewrite(mod, after, compile_)
        report.rewrite_checks += rows
        for row in rows:
            if not row.difference <= row.limit:
                emit(failure(row, name))
        return after

    return run

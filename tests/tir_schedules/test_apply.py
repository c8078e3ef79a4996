"""`ApplySchedules`: first rule wins, the input is untouched, and fusion keeps its hands off."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from tir_schedules.apply import ApplySchedules

LLVM = Target("llvm")


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((64, 64), "float32"), w: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            a = R.add(x, w)
            b = R.exp(a)
            R.output(b)
        return b


class Everything(ScheduleRule):
    def apply(self, func, target, tunable):
        return s_tir.Schedule(func)


class OnlyAdd(Everything):
    def apply(self, func, target, tunable):
        return s_tir.Schedule(func) if "T_add" in func.script() else None


def legalized() -> tvm.IRModule:
    return relax.transform.AnnotateTIROpPattern()(relax.transform.LegalizeOps()(Chain))


def attributes(mod: tvm.IRModule, key: str) -> dict[str, object]:
    return {
        var.name_hint: func.attrs.get(key)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }


def apply(mod: tvm.IRModule, *rules: ScheduleRule) -> tvm.IRModule:
    with LLVM:
        return ApplySchedules(*rules)(mod)


def fuse_again(mod: tvm.IRModule) -> dict[str, object]:
    """What TVM's default pipelines do after ours; which functions are still scheduled."""
    t = relax.transform
    passes = [t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FoldConstant(), t.FuseOps(), t.FuseTIR()]
    with LLVM:
        return attributes(tvm.transform.Sequential(passes)(mod), "tirx.is_scheduled")


def test_the_first_rule_that_takes_a_function_is_named():
    rules = attributes(apply(legalized(), OnlyAdd(), Everything()), "sits.rule")
    assert rules == {"add": "OnlyAdd", "tir_exp": "Everything"}


def test_rules_of_tvm_are_told_apart_from_ours():
    with Target({"kind": "cuda", "arch": "sm_90", "max_num_threads": 1024}):
        mod = ApplySchedules(s_tir.dlight.gpu.Fallback())(legalized())
    assert set(attributes(mod, "sits.rule").values()) == {"dlight.Fallback"}


def test_a_function_no_rule_takes_says_so():
    mod = apply(legalized(), OnlyAdd())
    assert attributes(mod, "sits.rule") == {"add": "OnlyAdd", "tir_exp": "none"}
    assert not attributes(mod, "tirx.is_scheduled")["tir_exp"]


def test_scheduled_functions_are_left_alone():
    once = apply(legalized(), Everything())
    tvm.ir.assert_structural_equal(apply(once, OnlyAdd()), once)


def test_the_input_is_not_written_to():
    mod = legalized()
    digest = tvm_ffi.structural_hash(mod)
    apply(mod, Everything())
    assert tvm_ffi.structural_hash(mod) == digest


def test_a_target_on_the_function_needs_no_scope():
    mod = legalized()
    functions = {
        var: func.with_attr("target", LLVM) if isinstance(func, tirx.PrimFunc) else func
        for var, func in mod.functions_items()
    }
    scheduled = ApplySchedules(Everything())(tvm.IRModule(functions))
    assert set(attributes(scheduled, "sits.rule").values()) == {"Everything"}


def test_a_second_fusion_leaves_scheduled_functions_whole():
    assert fuse_again(apply(legalized(), Everything())) == {"add": True, "tir_exp": True}


def test_without_the_opaque_pattern_fusion_would_merge_them():
    """Why `ApplySchedules` marks functions: dlight's pass does not."""
    with LLVM:
        mod = s_tir.dlight.ApplyDefaultSchedule(Everything())(legalized())
    assert list(fuse_again(mod)) == ["fused_add_tir_exp"]

"""Every op through the pipeline on llvm with the fallback schedule, against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from op_zoo import ELEMENTWISE, ROWS, ZOO, Case, Input
from tvm import relax, tirx
from tvm.relax import op as O
from tvm.target import Target
from tvm.tirx import For, ForKind

from sits_tvm import parse_target
from tir_schedules import RULES
from tir_schedules.apply import ApplySchedules
from tir_schedules.cpu.fallback import CpuFallback
from tir_schedules.cpu_target import vector_lanes

HOST = Target({"kind": "llvm", "mcpu": tvm.get_global_func("target.llvm_get_system_cpu")()})
GENERIC = Target({"kind": "llvm"})
FALLBACK = (CpuFallback(),)
# None, around the vector widths, and one that runs in parallel.
EXTENTS = (0, 1, 2, 15, 16, 17, 33, 500)
WITHOUT_RULE = {"scatter_elements"}


def lower(case: Case, n: object, target: Target = HOST, rules=FALLBACK) -> tvm.IRModule:
    """The case as a module with fused and scheduled PrimFuncs."""
    bb = relax.BlockBuilder()
    args = [
        relax.Var(f"x{i}", relax.TensorType(each.shape_at(n), each.dtype))
        for i, each in enumerate(case.inputs)
    ]
    with bb.function("main", args):
        with bb.dataflow():
            result = bb.emit_output(bb.normalize(case.build(*args)))
        bb.emit_func_output(result)
    t = relax.transform
    passes = [t.LegalizeOps(), t.AnnotateTIROpPattern(), t.FoldConstant(), t.FuseOps(), t.FuseTIR()]
    with target:
        return tvm.transform.Sequential([*passes, ApplySchedules(*rules)])(bb.get())


def prim_funcs(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    functions = {var.name_hint: func for var, func in mod.functions_items()}
    return {name: func for name, func in functions.items() if isinstance(func, tirx.PrimFunc)}


def check(case: Case, mod: tvm.IRModule, extents: tuple[int, ...], target: Target = HOST) -> None:
    """Build and compare with the reference for each extent of "n"."""
    main = relax.VirtualMachine(relax.build(mod, target), tvm.cpu())["main"]
    rng = np.random.default_rng(0)
    for n in extents:
        inputs = [each.draw(rng, n) for each in case.inputs]
        got = main(*[tvm.runtime.tensor(x) for x in inputs])
        want = case.reference(*[_double(x) for x in inputs])
        got, want = (x if isinstance(x, (tuple, list)) else [x] for x in (_listed(got), want))
        for ours, reference in zip(got, want, strict=True):
            np.testing.assert_allclose(
                ours.numpy().astype("float64"),
                reference.numpy().astype("float64"),
                rtol=case.tolerance, atol=case.tolerance, err_msg=f"n={n}",
            )  # fmt: skip


def _double(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype("float64") if x.dtype.kind == "f" else x)


def _listed(result: object) -> object:
    return result if hasattr(result, "numpy") else list(result)


def loops_of(func: tirx.PrimFunc, kind: ForKind) -> list[For]:
    found: list[For] = []
    tvm_ffi.structural_walk(func.body, (For, lambda x: found.append(x) if x.kind == kind else None))
    return found


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.is_symbolic])
def test_symbolic_extent_matches_torch(name):
    case = ZOO[name]
    check(case, lower(case, tirx.Var("n", "int64")), EXTENTS)


@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if not case.is_symbolic])
def test_static_shapes_match_torch(name):
    mod = lower(ZOO[name], None)
    check(ZOO[name], mod, (0,))
    rules = {name: func.attrs["sits.rule"] for name, func in prim_funcs(mod).items()}
    assert {name for name, rule in rules.items() if rule == "none"} <= WITHOUT_RULE


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "gelu_tanh_mul", "rotary", "sum_axis_1"])
def test_large_static_shapes_match_torch(name):
    check(ZOO[name], lower(ZOO[name], 500), (500,))


@pytest.mark.parametrize(
    "target", [GENERIC, Target({"kind": "llvm", "mcpu": "x86-64-v3"})], ids=str
)
@pytest.mark.parametrize("name", ["softmax", "rms_norm_fp16", "gelu", "rotary", "less", "take"])
def test_narrower_targets_match_torch(name, target):
    if "mcpu" in target.attrs and vector_lanes(HOST) < vector_lanes(target):
        pytest.skip("this machine has no AVX2")
    check(ZOO[name], lower(ZOO[name], tirx.Var("n", "int64"), target), (1, 17, 500), target)


@pytest.mark.parametrize("name", sorted(set(ELEMENTWISE) - {"one_axis", "scalar"}))
def test_elementwise_is_parallel_and_vectorised(name):
    (func,) = prim_funcs(lower(ELEMENTWISE[name], tirx.Var("n", "int64"))).values()
    assert len(loops_of(func, ForKind.PARALLEL)) == 1
    assert loops_of(func, ForKind.VECTORIZED)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "rms_norm", "layer_norm", "variance"])
def test_rows_are_one_parallel_region(name):
    """So a row's intermediate results stay in cache and need no buffer of the full size."""
    (func,) = prim_funcs(lower(ROWS[name], tirx.Var("n", "int64"))).values()
    assert len(loops_of(func, ForKind.PARALLEL)) == 1
    assert len(loops_of(func, ForKind.VECTORIZED)) >= 2


def test_small_static_work_is_not_parallel():
    small, large = (prim_funcs(lower(ZOO["softmax"], n)) for n in (4, 500))
    assert not loops_of(small["softmax"], ForKind.PARALLEL)
    assert loops_of(large["softmax"], ForKind.PARALLEL)


def test_exp_is_computed_once_per_element():
    """Inlined into its two readers it would be computed twice."""
    (func,) = prim_funcs(lower(ROWS["softmax"], 64)).values()
    vectors = [loop for loop in loops_of(func, ForKind.VECTORIZED) if "reinterpret" in str(loop)]
    assert len(vectors) == 1


def test_never_reads_or_writes_outside_a_buffer():
    """TVM's own bound checker, on extents that leave every kind of tail."""
    with tvm.transform.PassContext(config={"tirx.instrument_bound_checkers": True}):
        for name in ("softmax", "rms_norm", "rotary_odd_half", "concat_axis_1", "sum_axis_0"):
            check(ZOO[name], lower(ZOO[name], tirx.Var("n", "int64")), EXTENTS)


def test_long_sums_are_blocked():
    """Their error is a small part of that of adding one by one."""
    x = np.full(1 << 20, 0.1, "float32")
    total = Case(O.sum, torch.sum, (Input(x.shape),))
    main = relax.VirtualMachine(relax.build(lower(total, None), HOST), tvm.cpu())["main"]
    exact, one_by_one = x.astype("float64").sum(), x.cumsum()[-1]
    error = abs(main(tvm.runtime.tensor(x)).numpy() - exact)
    assert error < abs(one_by_one - exact) / 16


def test_leaves_other_targets_alone():
    (func,) = prim_funcs(lower(ROWS["softmax"], 64, HOST, ())).values()
    assert CpuFallback().apply(func, Target({"kind": "c"}), False) is None
    assert CpuFallback().apply(func, HOST, False) is not None


@pytest.mark.parametrize("name", ["matmul", "softmax", "residual_norm", "swap_heads"])
def test_works_behind_the_other_rules(name):
    check(ZOO[name], lower(ZOO[name], tirx.Var("n", "int64"), HOST, RULES), (0, 1, 33, 500))


@pytest.mark.parametrize(
    ("options", "lanes"),
    [("", 4), ("-mcpu=haswell", 8), ("-mattr=+avx2", 8), ("-mcpu=znver4", 16)],
)
def test_vectors_are_as_wide_as_the_target(options, lanes):
    assert vector_lanes(parse_target(f"llvm -mtriple=x86_64-linux-gnu {options}")) == lanes

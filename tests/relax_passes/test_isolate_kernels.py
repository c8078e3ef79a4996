from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import tirx as T

import sits_tvm
from relax_passes import IsolateKernels


@I.ir_module
class Kernels:
    @T.prim_func(private=True, s_tir=True)
    def any_extents(a: T.handle, c: T.handle):
        n, m = T.int64(), T.int64()
        A, C = T.match_buffer(a, (n, m), "float32"), T.match_buffer(c, (n, m), "float32")
        for i, j in T.grid(n, m):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def int32_extents(A: T.Buffer((3, 4), "float32"), C: T.Buffer((3, 4), "float32")):
        for i, j in T.grid(3, 4):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def scalar_extent(a: T.handle, n: T.int64, c: T.handle):
        A = T.match_buffer(a, (n, T.int64(4)), "float32")
        C = T.match_buffer(c, (n, T.int64(4)), "float32")
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def strides(a: T.handle, c: T.handle):
        n, s = T.int64(), T.int64()
        A = T.match_buffer(a, (n, T.int64(4)), "float32", strides=(s, T.int64(1)))
        C = T.match_buffer(c, (n, T.int64(4)), "float32")
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def offset(a: T.handle, c: T.handle):
        n = T.int64()
        A = T.match_buffer(a, (n, T.int64(4)), "float32", offset_factor=1)
        C = T.match_buffer(c, (n, T.int64(4)), "float32", align=16)
        for i, j in T.grid(n, T.int64(4)):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + T.float32(1)

    @T.prim_func(private=True, s_tir=True)
    def in_place(a: T.handle):
        n, m = T.int64(), T.int64()
        A = T.match_buffer(a, (n, m), "float32")
        for i, j in T.grid(n, m):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = A[vi, vj] + T.float32(1)


EXTENTS = {"static": lambda s: 3, "symbolic": lambda s: s, "sum": lambda s: s + 1}


def module(kernel, extent):
    """exp(1 + tanh(x)), the sum by a kernel of the user's; x (extent, 4)."""
    bb, s = relax.BlockBuilder(Kernels), tirx.Var("s", "int64")
    gvar, type_ = Kernels.get_global_var(kernel), relax.TensorType([extent(s), 4], "float32")
    x, known = relax.Var("x", type_), relax.Var("known", relax.TensorType([s], "float32"))
    with bb.function("main", [x, known]):
        with bb.dataflow():
            scalars = [type_.shape[0]] if kernel == "scalar_extent" else []
            args = [bb.emit(relax.op.tanh(x)), *scalars]
            in_place = kernel == "in_place"
            call = (
                relax.op.call_tir_inplace(gvar, args, [0], type_)
                if in_place
                else relax.call_tir(gvar, args, type_)
            )
            y = bb.emit_output(relax.op.exp(bb.emit(call)))
        bb.emit_func_output(y)
    return bb.get()


@pytest.mark.parametrize("kernel", [gvar.name_hint for gvar in Kernels.get_global_vars()])
def test_same_numbers(kernel) -> None:
    for name in ["static"] if kernel == "int32_extents" else EXTENTS:
        mod = module(kernel, EXTENTS[name])
        digest = tvm.ir.save_json(mod)
        ex = sits_tvm.build(mod, "llvm")
        assert tvm.ir.save_json(mod) == digest
        x = np.random.default_rng(0).standard_normal((EXTENTS[name](5), 4)).astype("float32")
        got = relax.VirtualMachine(ex, tvm.cpu())["main"](x, np.zeros(5, "float32"))
        np.testing.assert_allclose(got.numpy(), np.exp(1 + np.tanh(x)), rtol=1e-6)
        assert any(kernel in made.name for made in ex.report.kernels)


def before_fusion(mod):
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.AnnotateTIROpPattern(),
    ]
    return tvm.transform.Sequential(passes)(mod)


def fuse(mod):
    fused = tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])
    return fused(mod)


def test_fuse_tir_needs_it() -> None:
    mod = before_fusion(module("int32_extents", EXTENTS["static"]))
    with pytest.raises(tvm.error.InternalError, match="Inconsistent buffers"):
        fuse(mod)
    fuse(IsolateKernels()(mod))


def test_match_cast_of_a_known_extent() -> None:
    """The kernel of exp is made for `c` rows, and called for 3."""
    bb, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([3, 4], "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            named = relax.TensorType([tirx.Var("c", "int64"), 4], "float32")
            y = bb.emit_output(relax.op.exp(bb.match_cast(bb.emit(relax.op.tanh(x)), named)))
        bb.emit_func_output(y)
    ex = sits_tvm.build(bb.get(), "llvm")
    x = np.ones((3, 4), "float32")
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](x)
    np.testing.assert_allclose(got.numpy(), np.exp(np.tanh(x)), rtol=1e-6)


def test_leaves_what_fits_alone() -> None:
    """Symbolic extents of other names fit, and all that TVM makes."""
    bb, s = relax.BlockBuilder(Kernels), tirx.Var("s", "int64")
    type_ = relax.TensorType([s, tirx.Var("r", "int64")], "float32")
    x, gvar = relax.Var("x", type_), Kernels.get_global_var("any_extents")
    with bb.function("main", [x]):
        with bb.dataflow():
            t = bb.emit(relax.op.tanh(x))
            y = bb.emit_output(relax.op.exp(bb.emit(relax.call_tir(gvar, [t], type_))))
        bb.emit_func_output(y)
    mod = before_fusion(bb.get())
    assert IsolateKernels()(mod).same_as(mod)
    assert_structural_equal(fuse(IsolateKernels()(mod)), fuse(mod))

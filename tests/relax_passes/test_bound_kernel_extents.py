"""BoundKernelExtents: kernels have no code for more rows than their callers allow."""

import pytest
import tvm_ffi
from small_modules import one_function
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from relax_passes import BoundKernelExtents
from sits_tvm import Config, QuantSpec
from tir_schedules.records.space import UPPER_BOUNDS

FEW = ("1", "2-8", "9-16")
ALL = (*FEW, "17-32", "33-64", "65-256", "257+")


def model(bounds, n=4096, k=4096, rows=("s",)):
    """A function for each of `bounds`, all with the same product."""
    builder = relax.BlockBuilder()
    for number, bound in enumerate(bounds):
        extents = [tirx.Var(name, "int64") for name in rows]
        x = relax.Var("x", relax.TensorType([*extents, k], "float16"))
        w = relax.Var("w", relax.TensorType([n, k], "float16"))
        attrs = {"num_input": 1, **({"tir_var_upper_bound": bound} if bound else {})}
        with builder.function(f"f{number}", [x, w], attrs=attrs):
            with builder.dataflow():
                y = builder.emit(relax.op.matmul(x, builder.emit(relax.op.permute_dims(w))))
                y = builder.emit_output(y)
            builder.emit_func_output(y)
    return builder.get()


def rows_of(mod, target="cuda -arch=sm_90"):
    """The ranges of rows that the kernel has records, and so code, for."""
    _, report = sits_tvm.lower(mod, target, config=Config(quant=QuantSpec()))
    (kernel,) = [k for k in report.kernels if k.family in ("TensorCoreMatmul", "Matmul")]
    return kernel.tuned_rows


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ([{"s": 16}], FEW),
        ([{"s": 17}], ALL[:4]),
        ([{"s": 1}], ALL[:1]),
        ([{"s": 1024}], ALL),
        ([None], ALL),
        ([{"t": 16}], ALL),
        ([{"s": 16}, {"s": 8}], FEW),
        ([{"s": 16}, {"s": 32}], ALL[:4]),
        ([{"s": 16}, None], ALL),
    ],
)
def test_the_largest_of_all_calls_counts(bounds, expected):
    assert rows_of(model(bounds)) == expected


def test_rows_of_several_axes_are_multiplied():
    assert rows_of(model([{"b": 2, "s": 8}], rows=("b", "s"))) == FEW
    assert rows_of(model([{"b": 3, "s": 8}], rows=("b", "s"))) == ALL[:4]
    assert rows_of(model([{"s": 8}], rows=("b", "s"))) == ALL


def test_only_cuda_asks():
    _, report = sits_tvm.lower(model([{"s": 16}], 64, 128), "llvm -mcpu=native")
    assert "BoundKernelExtents" not in [run.name for run in report.passes]


@I.ir_module
class InPlace:
    @T.prim_func(private=True, s_tir=True)
    def twice(x: T.handle):
        m = T.int64()
        X = T.match_buffer(x, (m, 4))
        for i, j in T.grid(m, 4):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                X[vi, vj] = X[vi, vj] + X[vi, vj]

    @R.function
    def main(x: R.Tensor(("s", 4), "float32")):
        s = T.int64()
        R.func_attr({"tir_var_upper_bound": {"s": 8}})
        y = R.call_tir_inplace(InPlace.twice, (x,), [0], out_ty=R.Tensor((s, 4), "float32"))
        return y


@I.ir_module
class Direct:
    @T.prim_func(private=True, s_tir=True)
    def twice(x: T.handle, y: T.handle):
        m = T.int64()
        X, Y = T.match_buffer(x, (m, 4)), T.match_buffer(y, (m, 4))
        for i, j in T.grid(m, 4):
            with T.sblock("twice"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] + X[vi, vj]

    @R.function(pure=False)
    def main(x: R.Tensor(("s", 4), "float32"), z: R.Tensor(("t", 4), "float32")):
        s = T.int64()
        R.func_attr({"tir_var_upper_bound": {"s": 8}})
        cls = Direct
        y = R.call_tir(cls.twice, (x,), out_ty=R.Tensor((s, 4), "float32"))
        _ = cls.twice(z, z)
        return y


@pytest.mark.parametrize("mod", [InPlace, Direct])
def test_leaves_calls_of_another_kind_alone(mod):
    assert_structural_equal(BoundKernelExtents()(mod), mod)


def legalized(bound):
    rows = relax.TensorType([tirx.Var("s", "int64"), 4], "float32")
    mod = one_function(lambda bb, x: bb.emit(relax.op.exp(x)), rows)
    if bound:
        mod["main"] = mod["main"].with_attr("tir_var_upper_bound", bound)
    return relax.transform.LegalizeOps()(mod)


def test_leaves_kernels_without_bounds_alone():
    """And does not write to its input; applied twice, it is as once."""
    assert_structural_equal(BoundKernelExtents()(legalized(None)), legalized(None))
    mod = legalized({"s": 8})
    digest = tvm_ffi.structural_hash(mod)
    once = BoundKernelExtents()(mod)
    assert tvm_ffi.structural_hash(mod) == digest != tvm_ffi.structural_hash(once)
    assert_structural_equal(BoundKernelExtents()(once), once)
    (kernel,) = [func for func in once.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert dict(kernel.attrs[UPPER_BOUNDS]) == {"s": 8}

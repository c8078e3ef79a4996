"""Tensors without elements on a GPU: no kernel is started for them, whoever wrote it."""

import numpy as np
import pytest
import tvm
from attention_cuda_runs import symbolic_types
from attention_runs import call
from cuda_text import CudaText, CudaTextError
from kernel_runs import assert_close
from tvm import te
from tvm.ir import IRModule
from tvm.s_tir import dlight
from tvm.script import tirx as T

from sits_tvm import QuantSpec, parse_target
from sits_tvm.device_code import record_launches
from tir_schedules import RULES
from tir_schedules.apply import ApplySchedules
from tir_schedules.attention.rule import attention_kernel
from tir_schedules.empty_tensors import EmptyOutput, start_no_empty_grids
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul

HOPPER, TURING = (parse_target(f"cuda -arch={arch}") for arch in ("sm_90", "sm_75"))
SPEC = QuantSpec(group_size=32)


def apply(func, target):
    with target:
        return ApplySchedules(*RULES)(IRModule({"main": func}))["main"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "order", "k"), [(HOPPER, "fragments", 97), (TURING, "rows", 96)]
)
def test_products_that_tvm_schedules(target, order, k, rng):
    func = apply(int4_matmul(None, 40, k, SPEC, "float16", order), target)
    assert func.attrs["sits.rule"] == "dlight.Matmul"
    compiled = CudaText(func, target)
    parts = pack(rng.standard_normal((40, k)).astype("float32"), SPEC, order)
    weight = unpack(parts, PackedLayout(40, k, SPEC, order)).astype("float64")
    for rows in (0, 1, 33):
        x = rng.standard_normal((rows, k)).astype("float16")
        y = np.full((rows, 40), np.nan, "float16")
        compiled(x, *parts, y)
        assert_close(y, x.astype("float64") @ weight.T, x, weight.T)


def test_an_empty_grid_is_an_error_to_the_emulator():
    x = te.placeholder((te.var("n", "int64"),), "float32", name="x")
    func = te.create_prim_func([x, te.compute(x.shape, lambda i: x[i] + 1.0)])
    empty = np.zeros(0, "float32")
    with HOPPER:
        unguarded = dlight.gpu.Fallback().apply(func, HOPPER, False).mod["main"]
    with pytest.raises(CudaTextError, match="no blocks"):
        CudaText(unguarded, HOPPER)(empty, empty)
    compiled = CudaText(apply(func, HOPPER), HOPPER)
    compiled(empty, empty)
    out = np.zeros(3, "float32")
    compiled(np.arange(3, dtype="float32"), out)
    assert out.tolist() == [1, 2, 3]


def test_attention_of_no_queries():
    func = attention_kernel(call(symbolic_types()), HOPPER)
    compiled = CudaText(apply(func, HOPPER), HOPPER)
    shapes = (1, 4, 0, 32), (1, 2, 5, 32), (1, 2, 5, 32), (1, 4, 0, 32)
    compiled(*(np.zeros(shape, "float16") for shape in shapes))


@pytest.mark.parametrize(("target", "order"), [(HOPPER, "fragments"), (TURING, "rows")])
@pytest.mark.parametrize("k", [64, 65])
def test_static_rows_of_none(target, order, k):
    """TVM's rules divide by zero."""
    func = apply(int4_matmul(0, 32, k, SPEC, "float16", order), target)
    assert func.attrs["sits.rule"] == "EmptyOutput"
    with record_launches() as launches:
        tvm.compile(IRModule({"main": func.with_attr("global_symbol", "main")}), target=target)
    assert not launches


def test_a_sum_over_nothing_is_not_empty():
    """Its output has an element."""
    x = te.placeholder((0,), "float32", name="x")
    r = te.reduce_axis((0, 0), name="r")
    total = te.compute((1,), lambda _: te.sum(x[r], axis=r))
    func = te.create_prim_func([x, total])
    assert RULES[0].apply(func, HOPPER, False) is None


def test_one_empty_output_of_two_is_not_empty():
    x = te.placeholder((4,), "float32", name="x")
    none, some = (te.compute((extent,), lambda i: x[i] + 1.0) for extent in (0, 4))
    assert EmptyOutput().apply(te.create_prim_func([x, none, some]), HOPPER, False) is None


@T.prim_func(private=True, s_tir=True)
def two_kernels(x: T.handle, y: T.handle, z: T.handle):
    m, n = T.int64(), T.int64()
    X, Y = T.match_buffer(x, (m, n, 32)), T.match_buffer(y, (m, n, 32))
    Z = T.match_buffer(z, (m, n, 32))
    with T.sblock("root"):
        for i in T.thread_binding(m, "blockIdx.x"):
            for j in T.thread_binding(n, "blockIdx.y"):
                for k in T.thread_binding(32, "threadIdx.x"):
                    with T.sblock("first"):
                        vi, vj, vk = T.axis.remap("SSS", [i, j, k])
                        Y[vi, vj, vk] = X[vi, vj, vk]
        for i in T.thread_binding(m, "blockIdx.x"):
            for j in T.thread_binding(n, "blockIdx.y"):
                for k in T.thread_binding(32, "threadIdx.x"):
                    with T.sblock("second"):
                        vi, vj, vk = T.axis.remap("SSS", [i, j, k])
                        Z[vi, vj, vk] = X[vi, vj, vk]


def test_each_kernel_and_each_axis_of_its_grid_may_be_empty():
    compiled = CudaText(start_no_empty_grids(two_kernels), HOPPER, outputs=2)
    for shape in ((0, 3, 32), (3, 0, 32), (2, 3, 32)):
        x, *outputs = (np.full(shape, value, "float32") for value in (1, 0, 0))
        compiled(x, *outputs)
        assert all((y == 1).all() for y in outputs)

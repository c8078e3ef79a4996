import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_passes.check_sub_byte_buffers import CheckSubByteBuffers, check_sub_byte_buffers
from sits_tvm.diagnostics import collect


@I.ir_module
class Clean:
    @R.function
    def main(x: R.Tensor(("n", 4), "float16")) -> R.Tensor(("n", 4), "bool"):
        with R.dataflow():
            y = R.astype(x, "float8_e4m3fn")
            z = R.greater(R.astype(y, "float16"), x)
            R.output(z)
        return z

    @T.prim_func(s_tir=True)
    def kernel(A: T.Buffer((8,), "uint32"), B: T.Buffer((8,), "bool")):
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                B[v] = (A[v] & T.uint32(15)) == T.uint32(3)


def test_passes_what_can_be_built():
    assert check_sub_byte_buffers(Clean) == []
    with collect() as notes:
        assert CheckSubByteBuffers()(Clean).same_as(Clean)
    assert notes == []


def test_names_function_binding_op_and_dtype():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((4, 64), "int8")) -> R.Tensor((4, 64), "int8"):
            with R.dataflow():
                narrow = R.astype(x, "int4")
                wide = R.astype(narrow, "int8")
                R.output(wide)
            return wide

    with collect() as found:
        CheckSubByteBuffers()(Mod)
    (error,) = found
    assert (error.severity, error.code) == ("error", "sub-byte-buffer")
    assert (error.function, error.binding) == ("main", "narrow")
    assert error.message.startswith("R.astype makes a tensor of int4")
    assert error.ir == 'narrow: R.Tensor((4, 64), dtype="int4") = R.astype(x, dtype="int4")'
    assert "int8" in error.help


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float4_e2m1fn", "float6_e2m3fn"])
def test_lists_parameters_tuples_and_branches(dtype):
    def main():
        bb = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((4,), dtype))
        c = relax.Var("c", relax.TensorType((), "bool"))
        with bb.function("main", [x, c]):
            pair = bb.emit(relax.Tuple([x, c]), "pair")
            bb.emit_func_output(pair)
        return bb.get()

    found = check_sub_byte_buffers(main())
    assert [error.binding for error in found] == ["x", "pair"]
    assert all(dtype in error.message for error in found)


def test_looks_into_branches():
    @I.ir_module
    class Mod:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "int8")) -> R.Tensor((4,), "int8"):
            if c:
                a = R.astype(x, "int4")
                y = R.astype(a, "int8")
            else:
                y = R.add(x, x)
            return y

    assert [error.binding for error in check_sub_byte_buffers(Mod)] == ["a"]


@pytest.mark.parametrize("scope", ["global", "shared", "shared.dyn", "local", "warp"])
def test_finds_buffers_in_every_scope(scope):
    @T.prim_func(s_tir=True)
    def kernel(A: T.Buffer((8,), "int8"), B: T.Buffer((8,), "int8")):
        C = T.alloc_buffer((8,), "int4", scope=scope)
        for i in range(8):
            with T.sblock("c"):
                v = T.axis.spatial(8, i)
                C[v] = T.Cast("int4", A[v])
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                B[v] = T.Cast("int8", C[v])

    found = check_sub_byte_buffers(tvm.IRModule({"kernel": kernel}))
    messages = {error.binding: error.message for error in found}
    assert f"C is a buffer in scope {scope} of int4" in messages["C"]
    assert {error.function for error in found} == {"kernel"}


def test_finds_buffers_that_are_parameters_and_values_in_between():
    @T.prim_func(s_tir=True)
    def kernel(A: T.Buffer((8,), "uint4"), B: T.Buffer((8,), "int8")):
        for i in range(8):
            with T.sblock("b"):
                v = T.axis.spatial(8, i)
                B[v] = T.Cast("int8", T.Cast("int2", A[v]))

    found = check_sub_byte_buffers(tvm.IRModule({"kernel": kernel}))
    assert [error.binding for error in found] == ["A", "cast to int2"]

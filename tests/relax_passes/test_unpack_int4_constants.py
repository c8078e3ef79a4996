import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst, assert_structural_equal

from relax_passes.check_sub_byte_buffers import check_sub_byte_buffers
from relax_passes.unpack_int4_constants import UnpackInt4Constants

VALUES = np.array([[1, -2, 3], [-4, 7, -8]])


def module(weights, named=False, use=lambda bb, w: bb.emit(relax.op.astype(w, "float32"))):
    """main(x) = x + cast(weights)"""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(weights.shape, "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            constant = relax.const(weights, str(weights.dtype))
            w = use(bb, bb.emit(constant) if named else constant)
            y = bb.emit_output(relax.op.add(x, w))
        bb.emit_func_output(y)
    return bb.get()


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    assert_structural_equal(UnpackInt4Constants()(before), expected)
    assert tvm_ffi.structural_hash(before) == digest


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("narrow", "wide"), [("int4", "int8"), ("uint4", "uint8")])
def test_unpacks_under_a_cast(narrow, wide, named):
    values = VALUES if narrow == "int4" else VALUES % 16
    before = module(values.astype(getattr(ml_dtypes, narrow)), named)
    verify(before, module(values.astype(wide)))


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_leaves_other_constants_alone(dtype):
    before = module(VALUES.astype(dtype))
    verify(before, before)


def test_leaves_constants_that_are_no_tensors_alone():
    bb = relax.BlockBuilder()
    with bb.function("main", []):
        bb.emit_func_output(bb.emit(GenericConst(tvm.DataType("float32"), relax.AnyType())))
    verify(bb.get(), bb.get())


def test_leaves_other_uses_to_the_check():
    """Only a cast does not care in what its argument is stored."""

    def transposed(bb, w):
        w = bb.emit(relax.op.permute_dims(bb.emit(relax.op.permute_dims(w))))
        return bb.emit(relax.op.astype(w, "float32"))

    before = module(VALUES.astype(ml_dtypes.int4), use=transposed)
    verify(before, before)
    assert "int4" in check_sub_byte_buffers(UnpackInt4Constants()(before))[0].message


def test_same_numbers():
    mod = UnpackInt4Constants()(module(VALUES.astype(ml_dtypes.int4), named=True))
    vm = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    out = vm["main"](tvm.runtime.tensor(np.zeros(VALUES.shape, "float32"))).numpy()
    assert np.array_equal(out, VALUES.astype("float32"))

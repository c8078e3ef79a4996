import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from relax_passes.split_shared_operands import SplitSharedOperands


@I.ir_module
class Shared:
    @R.function
    def main(x: R.Tensor((2, 3, 4), "float32"), w: R.Tensor((2, 5, 4), "float32")):
        with R.dataflow():
            wt = R.permute_dims(w, axes=[0, 2, 1])
            y = R.matmul(x, wt)
            back = R.matmul(y, R.permute_dims(wt, axes=[0, 2, 1]))
            z = R.exp(wt)
            R.output(y, back, z)
        return (y, back, z)


def test_leaves_a_transpose_with_one_reader_alone():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                wt = R.permute_dims(w)
                y = R.matmul(x, wt)
                R.output(y)
            return y

    assert_structural_equal(SplitSharedOperands()(Mod), Mod)


def test_two_products_of_one_transpose_get_one_each():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                wt = R.permute_dims(w)
                y = R.add(R.matmul(x, wt), R.matmul(R.exp(x), wt))
                R.output(y)
            return y

    digest = tvm_ffi.structural_hash(Mod)
    after = SplitSharedOperands()(Mod)
    assert tvm_ffi.structural_hash(Mod) == digest
    assert after["main"].script().count("permute_dims") == 3
    relax.transform.FuseTransposeMatmul()(after)  # which raises on Mod
    with pytest.raises(AttributeError, match="TupleType"):
        relax.transform.FuseTransposeMatmul()(Shared)


def test_two_functions_get_constants_of_their_own():
    """`differentiate` copies bindings; FuseOpsByPattern refuses a constant in two functions."""
    bb = relax.BlockBuilder()
    zero = relax.const(0, "int64")
    for name in ("f", "g"):
        x, w = (relax.Var(n, relax.TensorType((4, 4), "float32")) for n in "xw")
        with bb.function(name, [x, w]):
            with bb.dataflow():
                y = bb.emit(O.matmul(x, bb.emit(O.permute_dims(w))))
                both = bb.emit_output(relax.Tuple([y, zero]))
            bb.emit_func_output(both)
    mod = bb.get()
    after = SplitSharedOperands()(mod)
    assert_structural_equal(after, mod)
    with pytest.raises(ValueError, match="multiple partitions"):
        relax.transform.FuseTransposeMatmul()(mod)
    relax.transform.FuseTransposeMatmul()(after)


def test_same_numbers(rng):
    x, w = (rng.standard_normal(s).astype("float32") for s in ((2, 3, 4), (2, 5, 4)))
    vm = relax.VirtualMachine(sits_tvm.build(Shared, "llvm -mcpu=native"), tvm.cpu())
    y, back, z = (part.numpy() for part in vm["main"](x, w))
    wt = w.transpose(0, 2, 1)
    np.testing.assert_allclose(y, x @ wt, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(back, x @ wt @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(z, np.exp(wt), rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), ("b", 3, 4)], ids=str)
def test_a_tensor_times_its_own_transpose(rng, shape):
    """TVM's FuseTransposeMatmul ends in an IndexError on it."""
    dims = [tvm.tirx.Var(d, "int64") if isinstance(d, str) else d for d in shape]
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(dims, "float32"))
    axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(O.matmul(x, bb.emit(O.permute_dims(x, axes))))
        bb.emit_func_output(out)
    value = rng.standard_normal([2 if isinstance(d, str) else d for d in shape]).astype("float32")
    ex = sits_tvm.build(bb.get(), "llvm -mcpu=native")
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](value).numpy()
    wide = value.astype("float64")
    np.testing.assert_allclose(got, wide @ np.swapaxes(wide, -1, -2), rtol=1e-5, atol=1e-5)

"""relax.sits.take_backward compiled: stray indices, half precision, symbols, and the errors."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal

from relax_passes.op.take_backward import take_backward
from sits_tvm import build, differentiate


def module(dtype, axis, mode="fast", *, shape=(5, 4)):
    """main(gy, indices (m,)) = take_backward into `shape`, with m symbolic."""
    m = tvm.tirx.Var("m", "int64")
    rows = list(shape)
    rows[axis] = m
    gy = relax.Var("gy", relax.TensorType(rows, dtype))
    indices = relax.Var("indices", relax.TensorType([m], "int64"))
    bb = relax.BlockBuilder()
    with bb.function("main", [gy, indices]):
        with bb.dataflow():
            out = bb.emit_output(take_backward(gy, indices, shape, axis=axis, mode=mode))
        bb.emit_func_output(out)
    return bb.get()


def run(mod, *arrays):
    vm = relax.VirtualMachine(build(mod, "llvm"), tvm.cpu())
    return vm["main"](*map(tvm.runtime.tensor, arrays)).numpy()


@pytest.mark.parametrize("axis", [0, -1])
def test_drops_indices_outside_the_table(axis, rng):
    """They must not write to memory that is not the table's."""
    shape = np.zeros((5, 4)).swapaxes(0, axis).shape
    gy = rng.standard_normal((6, 4)).astype("float32").swapaxes(0, axis).copy()
    indices = np.array([0, 3, 3, -1, 5, 1 << 40])
    expected = np.zeros((5, 4), "float32")
    np.add.at(expected, indices[:3], gy.swapaxes(0, axis)[:3])
    actual = run(module("float32", axis, shape=shape), gy, indices)
    np.testing.assert_allclose(actual, expected.swapaxes(0, axis), rtol=1e-6)


@pytest.mark.parametrize(("mode", "rows"), [("wrap", [4, 0]), ("clip", [0, 4])])
def test_wraps_or_clips(mode, rows):
    actual = run(module("float32", 0, mode), np.ones((2, 4), "float32"), np.array([-1, 5]))
    expected = np.zeros((5, 4), "float32")
    expected[rows] = 1
    np.testing.assert_array_equal(actual, expected)


def test_half_precision_is_summed_in_float32():
    """In float16, 2048 + 1 is 2048."""
    gy = np.ones((4096, 4), "float16")
    actual = run(module("float16", 0), gy, np.zeros(4096, "int64"))
    assert (actual[0] == 4096).all()
    assert not actual[1:].any()


def test_nothing_to_add():
    assert not run(module("float32", 0), np.zeros((0, 4), "float32"), np.zeros(0, "int64")).any()


def test_prints_and_parses():
    mod = module("float32", 0)
    assert_structural_equal(tvm.script.from_source(mod.script()), mod)


@pytest.mark.parametrize(
    ("dtype", "axis", "words"), [("float32", 0, "int32 or int64"), ("int64", 2, "axis=2")]
)
def test_refuses(dtype, axis, words):
    x = relax.Var("x", relax.TensorType([3, 4], "float32"))
    indices = relax.Var("i", relax.TensorType([3], dtype))
    with pytest.raises((TypeError, ValueError), match=words):
        relax.BlockBuilder().normalize(take_backward(x, indices, [5, 4], axis=axis))


def test_convolution_and_pooling_by_tvms_rules(rng):
    """Not ours, but what a convolutional net needs: rules that fit our pipeline."""
    torch = pytest.importorskip("torch")
    x, w = (rng.standard_normal(s).astype("float32") for s in ((2, 3, 8, 8), (4, 3, 3, 3)))
    bb = relax.BlockBuilder()
    args = [relax.Var(n, relax.TensorType(a.shape, "float32")) for n, a in (("x", x), ("w", w))]
    with bb.function("main", args):
        with bb.dataflow():
            y = bb.emit(relax.op.nn.conv2d(*args, padding=1))
            y = bb.emit(relax.op.nn.max_pool2d(bb.emit(relax.op.nn.relu(y)), (2, 2), (2, 2)))
            loss = bb.emit_output(relax.op.sum(bb.emit(relax.op.multiply(y, y))))
        bb.emit_func_output(loss)
    mod = differentiate(bb.get())
    only = {gv: f for gv, f in mod.functions.items() if gv.name_hint == "main_adjoint"}
    vm = relax.VirtualMachine(build(tvm.IRModule(only), "llvm"), tvm.cpu())
    _, ours = vm["main_adjoint"](tvm.runtime.tensor(x), tvm.runtime.tensor(w))
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    y = torch.nn.functional.conv2d(*tensors, padding=1).relu()
    torch.nn.functional.max_pool2d(y, 2).square().sum().backward()
    for gradient, tensor in zip(ours, tensors, strict=True):
        theirs = tensor.grad.numpy()
        assert np.linalg.norm(gradient.numpy() - theirs) <= 1e-5 * np.linalg.norm(theirs)

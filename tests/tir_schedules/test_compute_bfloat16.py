"""bfloat16 through the whole pipeline on llvm, against torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from op_zoo import ZOO
from tvm import relax
from tvm.relax import op as O

from sits_tvm import build, differentiate

TARGET = "llvm -num-cores=2"
BF16 = "bfloat16"
# Every kind of kernel: vectors, rows, columns, copies with constants, products.
NAMES = (
    *("add", "gelu", "gelu_tanh_mul", "softplus", "where", "one_long_row", "softmax", "rms_norm"),
    *("layer_norm", "sum_axis_0", "max_axis_0", "column_sum_used_by_all", "cross_entropy"),
    *("take", "scatter_elements", "cumsum", "tril", "pad", "topk", "sort", "matmul", "matmul_nt"),
    *("einsum", "conv2d_relu", "avg_pool2d"),
)


def module(build_, shapes, dtypes):
    bb = relax.BlockBuilder()
    types = map(relax.TensorType, shapes, dtypes)
    args = [relax.Var(f"x{i}", ty) for i, ty in enumerate(types)]
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(bb.normalize(build_(*args)))
        bb.emit_func_output(out)
    return bb.get()


def run(mod, arrays, name="main"):
    vm = relax.VirtualMachine(build(mod, TARGET), tvm.cpu())
    return vm[name](*map(tvm.runtime.tensor, arrays))


def as_float(tensor):
    return tensor.numpy().astype("float32")


def to_torch(array):
    is_float = array.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(array.astype("float32") if is_float else array)


@pytest.mark.parametrize("name", NAMES)
def test_the_op_zoo_in_bfloat16(name, rng):
    case, n = ZOO[name], 9
    arrays = [each.draw(rng, n) for each in case.inputs]
    arrays = [x.astype(BF16) if x.dtype == np.float32 else x for x in arrays]
    dtypes = [str(x.dtype) for x in arrays]
    out = run(module(case.build, [each.shape_at(n) for each in case.inputs], dtypes), arrays)
    want = case.reference(*map(to_torch, arrays)).numpy()
    assert str(out.dtype) == BF16
    assert np.abs(as_float(out) - want).max() < 2.0**-7 * np.abs(want).max()


SUMS = [
    (O.sum, [(1, 2048)], 2048),
    (O.mean, [(1, 2048)], 1),
    (lambda x: O.cumsum(x, 1), [(1, 2048)], 2048),
    (O.matmul, [(3, 2048), (2048, 4)], 2048),
    (lambda x, w: O.matmul(x, O.permute_dims(w)), [(1, 2048), (4, 2048)], 2048),
]


@pytest.mark.parametrize(("sum_", "shapes", "total"), SUMS)
def test_a_long_sum_does_not_stop_growing(sum_, shapes, total):
    """In bfloat16, 256 + 1 = 256."""
    mod = module(sum_, shapes, [BF16] * len(shapes))
    assert as_float(run(mod, [np.ones(shape, BF16) for shape in shapes])).max() == total


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (8,)])
def test_a_copy_to_many_places(shape, rng):
    x = rng.standard_normal(shape).astype(BF16)
    mod = module(lambda x: O.broadcast_to(x, (2, 8)), [shape], [BF16])
    np.testing.assert_array_equal(as_float(run(mod, [x])), np.broadcast_to(x, (2, 8)).astype("f4"))


def test_rounds_ties_to_even_and_keeps_what_is_not_finite():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.nan, np.inf, -np.inf, -0.0, 3.4e38, 1e-40], "f4")
    mod = module(lambda x: O.astype(O.sigmoid(O.astype(x, BF16)), BF16), [(8,)], ["float32"])
    cast = module(lambda x: O.astype(x, BF16), [(8,)], ["float32"])
    np.testing.assert_array_equal(as_float(run(cast, [x])), x.astype(BF16).astype("f4"))
    want = torch.from_numpy(x).bfloat16().sigmoid().float().numpy()
    np.testing.assert_allclose(as_float(run(mod, [x])), want, rtol=2.0**-8)


def _loss(i, table, k, w, gamma, target):
    """An embedding, a convolution, a normalization, a product and a cross entropy."""
    x = O.expand_dims(O.take(table, i, axis=0), 1)
    x = O.nn.gelu(O.nn.conv2d(x, k, padding=1))
    x = O.nn.layer_norm(O.reshape(x, (6, 32)), gamma, O.multiply(gamma, O.sigmoid(gamma)), [-1])
    return O.nn.nll_loss(O.nn.log_softmax(O.matmul(x, w), -1), target)


def _torch_loss(i, table, k, w, gamma, target):
    x = F.gelu(F.conv2d(table[i][:, None], k, padding=1)).reshape(6, 32)
    x = F.layer_norm(x, (32,), gamma, gamma * gamma.sigmoid())
    return F.cross_entropy(x @ w, target)


def test_gradients_in_bfloat16(rng):
    shapes = [(6, 2), (5, 16), (1, 1, 3, 3), (32, 7), (32,), (6,)]
    arrays = [rng.standard_normal(shape).astype(BF16) for shape in shapes]
    arrays[0] = rng.integers(0, 5, (6, 2))
    arrays[5] = rng.integers(0, 7, 6)
    dtypes = [str(x.dtype) for x in arrays]
    mod = module(_loss, shapes, dtypes)
    floats = [1, 2, 3, 4]
    adjoint = differentiate(mod, require_grads=[f"x{i}" for i in floats])
    _, gradients = run(adjoint, arrays, "main_adjoint")
    leaves = [to_torch(x) for x in arrays]
    _torch_loss(*[x.requires_grad_(x.is_floating_point()) for x in leaves]).backward()
    for i, got in zip(floats, gradients, strict=True):
        want = leaves[i].grad.numpy()
        assert np.abs(as_float(got) - want).max() < 0.04 * np.abs(want).max(), i

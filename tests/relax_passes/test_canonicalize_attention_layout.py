"""Heads and layouts, and numbers against float64."""

import numpy as np
import pytest
import tvm
from attention_blocks import (
    attention_of,
    canonical,
)
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm


@pytest.mark.parametrize(("heads", "groups"), [(14, 2), (28, 4), (8, 1), (4, 4)])
def test_repeated_heads_are_not_made(heads, groups):
    s = tvm.tirx.Var("s", "int64")

    def repeated(bb, x):
        r = heads // groups
        x = bb.emit(O.broadcast_to(bb.emit(O.expand_dims(x, 2)), (2, groups, r, s, 8)))
        return bb.emit(O.reshape(x, (2, heads, s, 8)))

    def body(bb, q, k, v):
        kt = bb.emit(O.permute_dims(repeated(bb, k), [0, 1, 3, 2]))
        weights = bb.emit(O.nn.softmax(bb.emit(O.matmul(q, kt)), axis=-1))
        return O.matmul(weights, repeated(bb, v))

    shapes = (2, heads, s, 8), (2, groups, s, 8), (2, groups, s, 8)
    mod = one_function(body, *(relax.TensorType(shape, "float32") for shape in shapes))
    args = attention_of(mod)["args"]
    assert list(args) == list(mod["main"].params)


@I.ir_module
class Tiled:
    """Query head h reads key head h mod 2: no grouped attention, and none of 2 heads."""

    @R.function
    def main(
        q: R.Tensor((2, 4, 6, 8), "float32"),
        k: R.Tensor((2, 2, 7, 8), "float32"),
        v: R.Tensor((2, 2, 7, 8), "float32"),
    ):
        with R.dataflow():
            keys = R.tile(k, repeats=[1, 2, 1, 1])
            values = R.tile(v, repeats=[1, 2, 1, 1])
            scores = R.matmul(q, R.permute_dims(keys, axes=[0, 1, 3, 2]))
            y = R.matmul(R.nn.softmax(scores, axis=-1), values)
            R.output(y)
        return y


@I.ir_module
class Folded:
    """Batch and heads in one axis, scores transposed, a factor on q before the split."""

    @R.function
    def main(
        x: R.Tensor((2, 6, 32), "float32"),
        y: R.Tensor((2, 7, 32), "float32"),
        z: R.Tensor((2, 7, 32), "float32"),
    ):
        with R.dataflow():
            scaled = R.multiply(x, R.const(0.5, "float32"))
            q4 = R.permute_dims(R.reshape(scaled, R.shape([2, 6, 4, 8])), axes=[0, 2, 3, 1])
            k4 = R.permute_dims(R.reshape(y, R.shape([2, 7, 4, 8])), axes=[0, 2, 1, 3])
            v4 = R.permute_dims(R.reshape(z, R.shape([2, 7, 4, 8])), axes=[0, 2, 3, 1])
            q = R.reshape(q4, R.shape([8, 8, 6]))
            k = R.reshape(k4, R.shape([8, 7, 8]))
            v = R.reshape(v4, R.shape([8, 8, 7]))
            scores = R.matmul(k, q)
            out = R.matmul(v, R.nn.softmax(scores, axis=1))
            R.output(out)
        return out


@I.ir_module
class Einsum:
    @R.function
    def main(
        q: R.Tensor((2, 6, 4, 8), "float32"),
        k: R.Tensor((2, 7, 4, 8), "float32"),
        v: R.Tensor((2, 7, 4, 5), "float32"),
    ):
        with R.dataflow():
            scores = R.einsum((q, k), subscripts="bqhd,bkhd->bhkq")
            weights = R.nn.softmax(scores, axis=2)
            out = R.einsum((weights, v), subscripts="bhkq,bkhe->bqhe")
            R.output(out)
        return out


@I.ir_module
class TvmOp:
    """Grouped heads, which TVM's own lowering reads from other batch rows."""

    @R.function
    def main(
        q: R.Tensor((2, 6, 4, 8), "float32"),
        k: R.Tensor((2, 7, 2, 8), "float32"),
        v: R.Tensor((2, 7, 2, 5), "float32"),
    ):
        with R.dataflow():
            out = R.nn.attention(q, k, v, causal_mask="BottomRight")
            R.output(out)
        return out


@I.ir_module
class DividedLast:
    """Views of the product of exponentials and values, times 1 / sum."""

    @R.function
    def main(
        q: R.Tensor((2, 4, 6, 8), "float32"),
        k: R.Tensor((2, 4, 7, 8), "float32"),
        v: R.Tensor((2, 4, 7, 5), "float32"),
    ):
        with R.dataflow():
            scores = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
            powers = R.exp(scores)
            folded = R.reshape(powers, R.shape([8, 6, 7]))
            product = R.matmul(folded, R.reshape(v, R.shape([8, 7, 5])))
            heads = R.reshape(product, R.shape([2, 4, 6, 5]))
            last = R.permute_dims(heads, axes=[0, 2, 1, 3])
            one = R.divide(R.const(1.0, "float32"), R.sum(powers, axis=[-1], keepdims=True))
            out = R.multiply(last, R.permute_dims(one, axes=[0, 2, 1, 3]))
            R.output(out)
        return out


def test_folded_heads_are_found():
    found = attention_of(Folded)
    assert found["scale"] == 0.5
    assert [list(map(int, x.ty.shape)) for x in found["args"]] == [[2, 4, n, 8] for n in (6, 7, 7)]


# Numbers, against float64.


def reference(q, k, v, mask=None):
    scores = np.einsum("bhid,bhjd->bhij", q, k)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)


def tiled(q, k, v):
    return reference(q, np.tile(k, (1, 2, 1, 1)), np.tile(v, (1, 2, 1, 1)))


def folded(x, y, z):
    q, k, v = (a.reshape(2, -1, 4, 8).transpose(0, 2, 1, 3) for a in (0.5 * x, y, z))
    return reference(q, k, v).reshape(8, 6, 8).transpose(0, 2, 1)


def einsum(q, k, v):
    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
    return reference(q, k, v).transpose(0, 2, 1, 3)


def tvm_op(q, k, v):
    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q / 8**0.5, k, v))
    mask = np.arange(7) <= np.arange(6)[:, None] + 1
    return reference(q, k.repeat(2, 1), v.repeat(2, 1), mask).transpose(0, 2, 1, 3)


def divided_last(q, k, v):
    return reference(q, k, v).transpose(0, 2, 1, 3)


@pytest.mark.parametrize(
    ("mod", "meaning"),
    [
        (Tiled, tiled),
        (Folded, folded),
        (Einsum, einsum),
        (TvmOp, tvm_op),
        (DividedLast, divided_last),
    ],
)
def test_same_numbers(mod, meaning):
    after, rows = canonical(mod)
    assert [row.recognised for row in rows] == [True]
    rng = np.random.default_rng(0)
    shapes = [list(map(int, p.ty.shape)) for p in mod["main"].params]
    inputs = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    vm = relax.VirtualMachine(sits_tvm.build(after, "llvm"), tvm.cpu())
    found = vm["main"](*inputs).numpy()
    np.testing.assert_allclose(found, meaning(*(x.astype(float) for x in inputs)), 1e-5, 1e-5)

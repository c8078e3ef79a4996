"""Attention in functions with copies, branches, and dimensions that are matched."""

from attention_blocks import attention_of, block, canonical
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

SHAPES = (2, 4, 6, 8), (2, 4, 7, 8), (2, 4, 7, 8)


def test_copies_of_scores_weights_and_result():
    mod = block(lambda bb, s: bb.emit(s), after=lambda bb, w: bb.emit(w))
    assert attention_of(mod)["scale"] == 1.0


def test_weights_that_leave_as_a_copy():
    def body(bb, q, k, v):
        scores = bb.emit(O.matmul(q, bb.emit(O.permute_dims(k, [0, 1, 3, 2]))))
        weights = bb.emit(O.nn.softmax(scores, axis=-1))
        copy = bb.emit(weights)
        return relax.Tuple([bb.emit(O.matmul(weights, v)), copy])

    types = (relax.TensorType(shape, "float32") for shape in SHAPES)
    assert attention_of(one_function(body, *types))["scale"] == 1.0


def test_a_length_that_is_matched():
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, "s", 8), "float32"),
            k: R.Tensor((2, 4, "t", 8), "float32"),
            v: R.Tensor((2, 4, "u", 8), "float32"),
        ):
            t = T.int64()
            kt = R.permute_dims(k, axes=[0, 1, 3, 2])
            scores = R.matmul(q, kt)
            weights = R.nn.softmax(scores, axis=-1)
            values = R.match_cast(v, R.Tensor((2, 4, t, 8), "float32"))
            y = R.matmul(weights, values)
            return y

    assert attention_of(Mod)["causal"] is None


def test_a_block_in_a_branch():
    """Weights that the branch returns are returned."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            c: R.Tensor((), "bool"),
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
        ):
            if c:
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                weights = R.nn.softmax(scores, axis=-1)
                y = R.matmul(weights, v)
                z = (weights, y)
            else:
                z = (R.zeros(R.shape([2, 4, 6, 7]), "float32"), q)
            return z

    assert attention_of(Mod)["scale"] == 1.0


def test_weights_that_both_branches_read_stay():
    @I.ir_module
    class Mod:
        @R.function
        def main(
            c: R.Tensor((), "bool"),
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
        ):
            kt = R.permute_dims(k, axes=[0, 1, 3, 2])
            scores = R.matmul(q, kt)
            weights = R.nn.softmax(scores, axis=-1)
            if c:
                y = R.matmul(weights, v)
            else:
                doubled = R.add(v, v)
                y = R.matmul(weights, doubled)
            return y

    _, rows = canonical(Mod)
    assert [row.reason.split(":")[0] for row in rows] == ["weights-used-elsewhere"]

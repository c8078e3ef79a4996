"""What is almost attention has a row with the exact reason and binding; what is not has none."""

import re
from pathlib import Path

import pytest
from attention_blocks import attention_of, canonical, const, row_of
from attention_near_misses import NEAR_MISSES, by_hand
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

from relax_passes import canonical_attention
from relax_passes.canonical_attention.remedies import REMEDIES
from relax_passes.inline_private_functions import InlinePrivateFunctions
from sits_tvm.diagnostics import collect


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_has_a_row(name):
    mod, reason = NEAR_MISSES[name]
    with collect() as notes:
        _, rows = canonical(mod)
    assert [(row.recognised, row.reason) for row in rows] == [(False, reason)]
    assert all(note.help for note in notes)


def test_every_reason_says_what_to_write():
    source = "".join(
        path.read_text() for path in Path(canonical_attention.__path__[0]).glob("*.py")
    )
    raised = re.findall(r'NearMiss\(\s*"([a-z0-9-]+)"', source)
    assert set(raised) == set(REMEDIES)
    assert list(REMEDIES) == sorted(REMEDIES)


def test_times_one_over_the_sum():
    def weights(bb, powers):
        total = row_of(bb, powers, O.sum)
        return bb.emit(O.multiply(bb.emit(O.divide(const(1.0), total)), powers))

    assert attention_of(by_hand(weights))["scale"] == 1.0


# The softmax in a function of its own.


@I.ir_module
class Split:
    @R.function(private=True)
    def weights(x: R.Tensor((2, 4, 6, 7), "float32")) -> R.Tensor((2, 4, 6, 7), "float32"):
        with R.dataflow():
            half = R.multiply(x, R.const(0.5, "float32"))
            y = R.nn.softmax(half, axis=-1)
            R.output(y)
        return y

    @R.function
    def main(
        q: R.Tensor((2, 4, 6, 8), "float32"),
        k: R.Tensor((2, 4, 7, 8), "float32"),
        v: R.Tensor((2, 4, 7, 8), "float32"),
    ):
        cls = Split
        with R.dataflow():
            scores = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
            w = cls.weights(scores)
            y = R.matmul(w, v)
            R.output(y)
        return y


def test_softmax_in_a_function_of_its_own():
    _, (row,) = canonical(Split)
    reason = "softmax-in-function: the softmax is in the function `weights`, its products are not"
    assert (row.function, row.recognised, row.reason) == ("main", False, f"{reason}, at `w`")
    _, (row,) = canonical(InlinePrivateFunctions()(Split))
    assert row.recognised


@I.ir_module
class ProductApart:
    """The product of queries and keys in another function."""

    @R.function
    def product(
        q: R.Tensor((2, 4, 6, 8), "float32"), k: R.Tensor((2, 4, 7, 8), "float32")
    ) -> R.Tensor((2, 4, 6, 7), "float32"):
        with R.dataflow():
            y = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
            R.output(y)
        return y

    @R.function
    def main(
        q: R.Tensor((2, 4, 6, 8), "float32"),
        k: R.Tensor((2, 4, 7, 8), "float32"),
        v: R.Tensor((2, 4, 7, 8), "float32"),
    ):
        cls = ProductApart
        with R.dataflow():
            scores = cls.product(q, k)
            y = R.matmul(R.nn.softmax(scores, axis=-1), v)
            R.output(y)
        return y


def test_scores_of_another_function():
    _, (row,) = canonical(ProductApart)
    assert row.reason == "no-product: scores come from a call of `product`, at `scores`"


# No attention, no row.


def classifier(bb, x, w):
    return O.nn.softmax(bb.emit(O.matmul(x, w)), axis=-1)


def tied_classifier(bb, ids, table):
    """Of embeddings by the table that embeds them."""
    x = bb.emit(O.take(table, ids, axis=0))
    return O.nn.softmax(bb.emit(O.matmul(x, bb.emit(O.permute_dims(table)))), axis=-1)


def router(bb, x, w):
    """The weights of the best experts scale what these make."""
    shares = bb.emit(O.nn.softmax(bb.emit(O.matmul(x, w)), axis=-1))
    best = bb.emit(O.topk(shares, k=2, axis=-1, ret_type="values"))
    total = bb.emit(O.sum(best, axis=-1, keepdims=True))
    return O.divide(best, total)


def sigmoid_by_hand(bb, x, w):
    one = const(1.0)
    powers = bb.emit(O.exp(bb.emit(O.negative(bb.emit(O.matmul(x, w))))))
    return O.divide(one, bb.emit(O.add(one, powers)))


def similarities(bb, x, y):
    """A Gaussian of distances between activations has no sum."""
    products = bb.emit(O.matmul(x, bb.emit(O.permute_dims(y, [0, 2, 1]))))
    return O.exp(bb.emit(O.subtract(products, const(1.0))))


def similarity_loss(bb, x, y):
    """The logarithm of a sum of exponentials, in which no value is weighed."""
    products = bb.emit(O.matmul(x, bb.emit(O.permute_dims(y, [0, 2, 1]))))
    powers = bb.emit(O.exp(products))
    return O.log(bb.emit(O.sum(powers, axis=-1)))


FLOATS = {
    name: relax.TensorType(shape, "float32")
    for name, shape in {
        "rows": (5, 8),
        "batch": (2, 5, 8),
        "weight": (8, 3),
        "table": (9, 8),
    }.items()
}
NO_ATTENTION = {
    "classifier": (classifier, FLOATS["rows"], FLOATS["weight"]),
    "classifier of sequences": (classifier, FLOATS["batch"], FLOATS["weight"]),
    "tied classifier": (tied_classifier, relax.TensorType((2, 5), "int64"), FLOATS["table"]),
    "router": (router, FLOATS["batch"], FLOATS["weight"]),
    "sigmoid": (sigmoid_by_hand, FLOATS["rows"], FLOATS["weight"]),
    "similarities": (similarities, FLOATS["batch"], FLOATS["batch"]),
    "similarity loss": (similarity_loss, FLOATS["batch"], FLOATS["batch"]),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
@pytest.mark.parametrize("num_input", [None, 1])
def test_has_no_row(name, num_input):
    make, *types = NO_ATTENTION[name]
    assert canonical(one_function(make, *types, num_input=num_input))[1] == []

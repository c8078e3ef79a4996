"""Which graphs are attention, what is said of those that are not, and that numbers stay."""

import math

import numpy as np
import pytest
import tvm
import tvm_ffi
from small_modules import one_function
from tvm import relax
from tvm.ir import Op, assert_structural_equal
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from relax_passes.canonicalize_attention import CanonicalizeAttention
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report

INF = float("-inf")
LOWEST = float(np.finfo("float32").min)


def block(steps, *, q=(2, 4, 6, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8), after=None):
    """softmax(steps(bb, q kᵀ)) v, and `after(bb, weights)` before the second product."""

    def body(bb, q_, k_, v_):
        scores = bb.emit(O.matmul(q_, bb.emit(O.permute_dims(k_, [0, 1, 3, 2]))))
        weights = bb.emit(O.nn.softmax(steps(bb, scores), axis=-1))
        weights = weights if after is None else after(bb, weights)
        return O.matmul(weights, v_)

    return one_function(body, *(relax.TensorType(shape, "float32") for shape in (q, k, v)))


def canonical(mod):
    """The module after the pass and its report; the input stays as it is, twice is once."""
    digest, report = tvm_ffi.structural_hash(mod), Report()
    after = CanonicalizeAttention(report)(mod)
    assert tvm_ffi.structural_hash(mod) == digest
    assert_structural_equal(CanonicalizeAttention()(after), after)
    return after, report.attention


def attention_of(mod):
    """The one call, as a dictionary of its attributes and its bias."""
    after, rows = canonical(mod)
    assert [row.recognised for row in rows] == [True], rows
    calls = []

    def note(expr):
        if isinstance(expr, relax.Call) and expr.op == Op.get("relax.sits.attention"):
            calls.append(expr)

    relax.analysis.post_order_visit(after["main"], note)
    (call,) = calls
    bias = call.args[3] if len(call.args) > 3 else None
    return {**{key: call.attrs[key] for key in ATTRIBUTES}, "bias": bias, "args": call.args}


ATTRIBUTES = ("scale", "causal", "window", "softcap", "empty_row", "softmax_dtype")


def reason_of(mod):
    """The code of the one near miss; nothing is changed."""
    with collect() as notes:
        after, rows = canonical(mod)
    assert_structural_equal(after, mod)
    (row,) = rows
    assert not row.recognised
    code = row.reason.split(":")[0]
    assert {note.code for note in notes} == {f"attention-{code}"}
    return code


def const(value, dtype="float32"):
    return relax.const(value, dtype)


def causal(bb, rows=6, columns=7, k=0):
    ones = bb.emit(O.ones(relax.ShapeExpr([rows, columns]), "bool"))
    return bb.emit(O.tril(ones, k))


def masked(fill, k=0):
    def steps(bb, scores):
        return bb.emit(O.where(causal(bb, k=k), scores, const(fill)))

    return steps


# Scale and softcap.


@pytest.mark.parametrize(
    ("steps", "scale", "softcap"),
    [
        (lambda bb, s: s, 1.0, 0.0),
        (lambda bb, s: bb.emit(O.multiply(s, const(0.3))), 0.3, 0.0),
        (lambda bb, s: bb.emit(O.multiply(const(0.3), s)), 0.3, 0.0),
        (lambda bb, s: bb.emit(O.divide(s, const(math.sqrt(8)))), 8**-0.5, 0.0),
        (lambda bb, s: bb.emit(O.divide(s, const(8.1))), 1 / 8.1, 0.0),
        (lambda bb, s: bb.emit(O.divide(s, bb.emit(O.sqrt(const(8.0))))), 8**-0.5, 0.0),
        (lambda bb, s: bb.emit(O.multiply(bb.emit(O.multiply(s, const(3.0))), const(2.0))), 6, 0),
        (
            lambda bb, s: bb.emit(
                O.multiply(bb.emit(O.tanh(bb.emit(O.divide(s, const(5.0))))), const(5.0))
            ),
            1.0,
            5.0,
        ),
        (lambda bb, s: bb.emit(O.multiply(bb.emit(O.tanh(s)), const(4.0))), 4.0, 4.0),
    ],
)
def test_factors_and_softcap(steps, scale, softcap):
    found = attention_of(block(steps))
    assert found["scale"] == pytest.approx(scale, rel=1e-6)
    assert (found["softcap"], found["causal"], found["bias"]) == (softcap, None, None)


# Masks.


@pytest.mark.parametrize(
    ("fill", "k", "empty_row"),
    [(INF, 0, "nan"), (INF, -1, "nan"), (LOWEST, 0, "nan"), (LOWEST, -1, "uniform")],
)
def test_causal_masks_keep_the_meaning_of_empty_rows(fill, k, empty_row):
    """With k = -1 the first row is empty. Where no row is, the lowest number is as good as -inf."""
    found = attention_of(block(masked(fill, k)))
    assert (found["causal"], found["empty_row"], found["bias"]) == (k, empty_row, None)


def test_offset_is_bottom_right_for_symbolic_lengths():
    s, t = tvm.tirx.Var("s", "int64"), tvm.tirx.Var("t", "int64")

    def steps(bb, scores):
        row = bb.emit(O.arange(t - s, t, 1, "int64"))
        row = bb.emit(O.expand_dims(row, 1))
        column = bb.emit(O.arange(0, t, 1, "int64"))
        return bb.emit(O.where(bb.emit(O.less_equal(column, row)), scores, const(INF)))

    found = attention_of(block(steps, q=(2, 4, s, 8), k=(2, 4, t, 8), v=(2, 4, t, 8)))
    assert (found["causal"], found["bias"]) == ("bottom_right", None)


def test_a_run_time_mask_is_a_bias():
    """Nothing is proved of the contents: -inf by where() is a bool bias, an added float stays."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
            padding: R.Tensor((2, 1, 1, 7), "bool"),
            added: R.Tensor((7,), "float32"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                biased = R.add(scores, added)
                visible = R.where(padding, biased, R.const(float("-inf"), "float32"))
                weights = R.nn.softmax(visible, axis=-1)
                y = R.matmul(weights, v)
                R.output(y)
            return y

    found = attention_of(Mod)
    assert str(found["bias"].ty) == 'R.Tensor((2, 1, 1, 7), dtype="float32")'
    assert found["empty_row"] == "nan"


def test_masks_of_both_kinds_are_one_float_bias():
    """-inf and the lowest number together have no word in the op: the bias holds both."""

    def steps(bb, scores):
        return masked(LOWEST, k=-2)(bb, masked(INF, k=-1)(bb, scores))

    found = attention_of(block(steps))
    assert (found["causal"], str(found["bias"].ty.dtype)) == (None, "float32")


def test_a_bool_added_as_a_number_is_a_bias():
    def steps(bb, scores):
        return bb.emit(O.add(scores, bb.emit(O.astype(causal(bb), "float32"))))

    assert str(attention_of(block(steps))["bias"].ty.dtype) == "float32"


def test_a_mask_that_hides_nothing_is_none():
    assert attention_of(block(masked(INF, k=6)))["causal"] is None


# Empty rows.


def guarded(bb, weights):
    nan = bb.emit(O.isnan(weights))
    return bb.emit(O.where(nan, const(0.0), weights))


@pytest.mark.parametrize(
    ("fill", "empty_row"), [(INF, "zero"), (LOWEST, "uniform")], ids=["infinite", "lowest"]
)
def test_guard_against_nan(fill, empty_row):
    """A row of the lowest number is not NaN: the guard does nothing there."""
    assert attention_of(block(masked(fill, k=-1), after=guarded))["empty_row"] == empty_row


def test_safe_softmax():
    """As PyTorch decomposes scaled_dot_product_attention."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
            m: R.Tensor((6, 7), "bool"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                x = R.where(m, scores, R.const(float("-inf"), "float32"))
                weights = R.nn.softmax(x, axis=-1)
                hidden = R.equal(x, R.const(float("-inf"), "float32"))
                shown = R.astype(R.logical_not(hidden), "int8")
                any_shown = R.max(shown, axis=[-1], keepdims=True)
                empty = R.logical_not(R.astype(any_shown, "bool"))
                zeros = R.full_like(weights, R.const(0.0, "float32"))
                safe = R.where(empty, zeros, weights)
                y = R.matmul(safe, v)
                R.output(y)
            return y

    found = attention_of(Mod)
    assert (found["empty_row"], str(found["bias"].ty.dtype)) == ("zero", "bool")


def test_a_guard_with_another_meaning_is_refused():
    def after(bb, weights):
        low = bb.emit(O.less(weights, const(0.01)))
        return bb.emit(O.where(low, const(0.0), weights))

    assert reason_of(block(lambda bb, s: s, after=after)) == "weights-used-elsewhere"


# Near misses.


def multiplied_mask(bb, scores):
    return bb.emit(O.multiply(scores, bb.emit(O.astype(causal(bb), "float32"))))


def scaled_after_mask(bb, scores):
    return bb.emit(O.multiply(masked(INF)(bb, scores), const(0.5)))


def tanh_after_mask(bb, scores):
    return bb.emit(O.tanh(masked(LOWEST)(bb, scores)))


def own_maximum_added(bb, scores):
    return bb.emit(O.add(scores, bb.emit(O.max(scores, axis=-1, keepdims=True))))


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        (multiplied_mask, "scores-multiplied"),
        (scaled_after_mask, "scale-after-mask"),
        (tanh_after_mask, "tanh-after-mask"),
        (masked(-1e4), "fill-not-lowest"),
        (own_maximum_added, "mask-of-scores"),
        (lambda bb, s: bb.emit(O.sigmoid(s)), "no-product"),
        (lambda bb, s: bb.emit(O.multiply(s, const(0.0))), "scale-not-finite"),
    ],
)
def test_says_why_not(steps, code):
    assert reason_of(block(steps)) == code


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_over_another_axis(axis):
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((4, 4, 2, 8), "float32"),
            k: R.Tensor((4, 4, 3, 8), "float32"),
            v: R.Tensor((4, 4, 3, 8), "float32"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                scores = R.matmul(q, kt)
                weights = R.nn.softmax(scores, axis=axis)
                y = R.matmul(weights, v)
                R.output(y)
            return y

    assert reason_of(Mod) == "softmax-axis"


def test_mask_added_in_half_precision_under_a_wide_softmax():
    """In a row of nothing but hidden keys -65504 - 16 is -inf in float16, and not in float32."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float16"),
            k: R.Tensor((2, 4, 7, 8), "float16"),
            v: R.Tensor((2, 4, 7, 8), "float16"),
            m: R.Tensor((6, 7), "float16"),
        ):
            with R.dataflow():
                kt = R.permute_dims(k, axes=[0, 1, 3, 2])
                biased = R.add(R.matmul(q, kt), m)
                wide = R.astype(biased, "float32")
                weights = R.astype(R.nn.softmax(wide, axis=-1), "float16")
                y = R.matmul(weights, v)
                R.output(y)
            return y

    assert reason_of(Mod) == "mask-added-in-float16"


def test_a_classifier_is_no_near_miss():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor((2, 8), "float32"), w: R.Tensor((8, 3), "float32")):
            with R.dataflow():
                y = R.nn.softmax(R.matmul(x, w), axis=-1)
                R.output(y)
            return y

    assert canonical(Mod)[1] == []


# Heads and layout.


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


@pytest.mark.parametrize(
    ("mod", "meaning"), [(Tiled, tiled), (Folded, folded), (Einsum, einsum), (TvmOp, tvm_op)]
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


# What is returned, and what is one op already.


def test_returned_weights_keep_their_chain():
    """The product is fused, the weights are computed as before; the report says that it costs."""

    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
        ):
            with R.dataflow():
                scores = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
                weights = R.nn.softmax(scores, axis=-1)
                y = R.matmul(weights, v)
                R.output(weights, y)
            return (y, weights)

    after, (row,) = canonical(Mod)
    text = after.script()
    assert text.count("R.sits.attention") == text.count("R.nn.softmax") == 1
    assert "twice" in row.reason


def test_weights_of_two_products_are_left_alone():
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 4, 7, 8), "float32"),
            v: R.Tensor((2, 4, 7, 8), "float32"),
        ):
            with R.dataflow():
                scores = R.matmul(q, R.permute_dims(k, axes=[0, 1, 3, 2]))
                weights = R.nn.softmax(scores, axis=-1)
                y = R.matmul(weights, v)
                z = R.matmul(weights, k)
                R.output(y, z)
            return (y, z)

    assert reason_of(Mod) == "weights-used-elsewhere"


def test_an_op_sheds_repeated_heads_and_a_known_mask():
    @I.ir_module
    class Mod:
        @R.function
        def main(
            q: R.Tensor((2, 4, 6, 8), "float32"),
            k: R.Tensor((2, 2, 7, 8), "float32"),
            v: R.Tensor((2, 2, 7, 8), "float32"),
        ):
            with R.dataflow():
                mask = R.tril(R.ones(R.shape([6, 7]), "bool"), 1)
                keys = R.repeat(k, repeats=2, axis=1)
                values = R.repeat(v, repeats=2, axis=1)
                y = R.sits.attention(q, keys, values, mask, scale=0.5, empty_row="zero")
                R.output(y)
            return y

    found = attention_of(Mod)
    assert [arg.name for arg in found["args"]] == ["q", "k", "v"]
    assert (found["causal"], found["empty_row"]) == (1, "zero")


def test_names_the_binding():
    _, (row,) = canonical(block(multiplied_mask))
    assert row.reason.endswith("a factor per head, at `lv5`")

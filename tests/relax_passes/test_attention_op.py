"""relax.sits.attention: types, errors, TVMScript, JSON, and the ops that it becomes."""

import pytest
import tvm
from attention_calls import module, tensor
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import relax_passes.op  # noqa: F401  (registers R.sits.attention)
from relax_passes.lower_attention import LowerAttention
from relax_passes.op import attention
from sits_tvm.diagnostics import SitsError, collect


def test_keys_and_values_are_never_repeated():
    """Both products have one batch entry per key/value head, with the query heads as rows."""
    types = [tensor(1, 8, 512, 64), tensor(1, 2, 512, 64), tensor(1, 2, 512, 32)]
    mod = LowerAttention()(module(*types, causal=0))
    bound = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    matmuls = [x for x in bound if isinstance(x, relax.Call) and x.op.name == "relax.matmul"]
    shapes = [[[int(d) for d in arg.ty.shape] for arg in call.args] for call in matmuls]
    assert shapes == [
        [[1, 2, 2048, 64], [1, 2, 64, 512]],
        [[1, 2, 2048, 512], [1, 2, 512, 32]],
    ]


@I.ir_module
class _Written:
    @R.function
    def main(
        q: R.Tensor(("b", 4, "s", 8), "float32"),
        k: R.Tensor(("b", 2, "t", 8), "float32"),
        m: R.Tensor(("s", "t"), "bool"),
    ) -> R.Tensor(("b", 4, "s", 8), "float32"):
        with R.dataflow():
            y = R.sits.attention(
                q, k, k, m, scale=1 / 3, causal="bottom_right", window=7, empty_row="uniform"
            )
            R.output(y)
        return y


def test_prints_parses_and_survives_json():
    assert_structural_equal(tvm.script.from_source(_Written.script()), _Written)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(_Written)), _Written)
    assert relax.analysis.check_well_formed(_Written)


def test_cse_merges_equal_calls_only():
    q = relax.Var("q", tensor(1, 2, 3, 4))
    bb = relax.BlockBuilder()
    with bb.function("main", [q]):
        with bb.dataflow():
            calls = [bb.emit(attention(q, q, q, causal=c)) for c in (0, 0, 1)]
            out = bb.emit_output(relax.Tuple(calls))
        bb.emit_func_output(out)
    after = relax.transform.EliminateCommonSubexpr()(bb.get())
    assert after.script().count("sits.attention") == 2


def test_unknown_shapes_keep_rank_and_ask_for_match_cast():
    ty = relax.TensorType(dtype="float16", ndim=4)
    mod = module(ty, ty, ty, scale=0.5)
    assert mod["main"].ret_ty == relax.TensorType(dtype="float16", ndim=4)
    with collect() as found:
        assert_structural_equal(LowerAttention()(mod), mod)
    assert [d.code for d in found] == ["attention-shape-unknown"]
    assert found[0].function == "main"
    assert "match_cast" in found[0].help


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([(1, 4, 3, 8), (1, 3, 3, 8), (1, 3, 3, 8)], r"G=3 .* do not divide H=4"),
        (
            [(1, 4, 3, 8), (1, 4, 3, 6), (1, 4, 3, 8)],
            r"dimension D not provably equal: q \(1, 4, 3, 8\)",
        ),
        ([(1, 4, 3, 8), (2, 4, 3, 8), (1, 4, 3, 8)], r"batch not provably equal"),
        ([(1, 4, 3, 8), (1, 4, 3, 8), (1, 4, 5, 8)], r"number of keys Sk .* v \(1, 4, 5, 8\)"),
        ([(1, 4, 3, 8), (1, 4, 3, 8), (1, 2, 3, 8)], r"key/value heads G not provably equal"),
        ([(1, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)], r"q is R.Tensor\(\(1, 3, 8\)"),
        ([(1, 4, 3, 8)] * 3 + [(3, 2)], r"bias \(3, 2\) does not broadcast .* \(1, 4, 3, 3\)"),
        ([(1, 4, 3, 8), (1, 3, 5, 6), (1, 3, 3, 8)], r"D not .*; number of keys Sk .*; G=3"),
    ],
)
def test_shape_errors_show_the_shapes(types, message):
    with pytest.raises(ValueError, match=message):
        module(*(tensor(*shape) for shape in types))


def test_dtype_errors():
    half, single = tensor(1, 2, 3, 4, dtype="float16"), tensor(1, 2, 3, 4)
    with pytest.raises(ValueError, match="differ in dtype"):
        module(half, single, half)
    with pytest.raises(ValueError, match="scores_dtype float16 is narrower than q"):
        module(single, single, single, scores_dtype="float16")
    with pytest.raises(ValueError, match="softmax_dtype float16 is narrower than scores_dtype"):
        module(half, half, half, scores_dtype="float32", softmax_dtype="float16")
    with pytest.raises(ValueError, match="bias is int32; write bool"):
        module(single, single, single, tensor(3, 3, dtype="int32"))


def test_attribute_errors_come_all_at_once():
    q = relax.Var("q", tensor(1, 2, 3, 4))
    with pytest.raises(SitsError) as caught:
        attention(q, q, q, scale=float("nan"), causal=True, window=-1, softcap=-1.0, empty_row="0")
    text = str(caught.value)
    assert len(caught.value.diagnostics) == 5
    assert all(word in text for word in ("scale=nan", "causal=True", "window=-1", "empty_row='0'"))


def test_well_formed_checks_calls_made_by_hand():
    q = relax.Var("q", tensor(1, 2, 3, 4))
    good = attention(q, q, q)
    bad = relax.Call(good.op, good.args, {**dict(good.attrs.items()), "window": -3})
    bb = relax.BlockBuilder()
    with bb.function("main", [q]):
        out = bb.emit(bad)
        bb.emit_func_output(out)
    with pytest.raises(ValueError, match="window=-3"):
        relax.analysis.well_formed(bb.get())

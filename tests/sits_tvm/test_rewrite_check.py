"""`Config(verify=True)` runs what a pass changed: a wrong rewrite is an error."""

import pytest
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_passes import LowerAttention
from relax_passes.op import attention
from sits_tvm import Report
from sits_tvm.diagnostics import collect
from sits_tvm.pipeline import run_on_host
from sits_tvm.rewrite_check import check_rewrite, checked
from sits_tvm.rewrite_check.regions import changed_regions


def module(dtype="float32", layers=2):
    """Layers with a causal attention of 4 and 2 heads; the mask is an argument."""
    b, s = T.int64(), T.int64()
    x = relax.Var("x", relax.TensorType((b, 4, s, 8), dtype))
    k = relax.Var("k", relax.TensorType((b, 2, s, 8), dtype))
    mask = relax.Var("mask", relax.TensorType((b, 1, 1, s), "bool"))
    bb = relax.BlockBuilder()
    with bb.function("main", [x, k, mask]):
        with bb.dataflow():
            out = x
            for _ in range(layers):
                q = bb.emit(relax.op.tanh(out))
                v = bb.emit(relax.op.exp(k))
                out = bb.emit(attention(q, k, v, mask, causal=0, empty_row="zero"))
                out = bb.emit(relax.op.add(out, q))
            out = bb.emit_output(out)
        bb.emit_func_output(out)
    return bb.get()


def edited(mod, edit):
    """`mod` with each attention call as `edit` makes it of arguments and attributes."""

    @mutator
    class Edit(PyExprMutator):
        def visit_call_(self, call):
            call = super().visit_call_(call)
            if call.op.name != "relax.sits.attention":
                return call
            args, attrs = list(call.args), dict(call.attrs.items())
            attrs = {
                k: v if isinstance(v, int | float | str | None) else str(v)
                for k, v in attrs.items()
            }
            edit(self.builder_, args, attrs)
            return attention(*args, **attrs)

    out = mod.clone()
    out["main"] = Edit(mod).visit_expr(mod["main"])
    return out


def test_a_right_rewrite_is_right_on_every_draw():
    mod = module()
    rows = check_rewrite(mod, LowerAttention()(mod), run_on_host)
    assert len(rows) == 2
    assert all(row.draws > 12 and row.difference <= row.limit for row in rows), rows


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_limits_follow_the_dtype(dtype):
    mod = module(dtype=dtype, layers=1)
    rows = check_rewrite(mod, LowerAttention()(mod), run_on_host)
    assert [0 < row.difference <= row.limit < 0.5 for row in rows] == [True], rows


def _set(**changed):
    return lambda bb, args, attrs: attrs.update(changed)


def _tiled_heads(bb, args, attrs):
    for i in (1, 2):
        args[i] = bb.emit(relax.op.concat([args[i], args[i]], axis=1))


def _cast_to_half(bb, args, attrs):
    half = bb.emit(relax.op.astype(args[0], "float16"))
    args[0] = bb.emit(relax.op.astype(half, "float32"))


MUTANTS = {
    "scale": _set(scale=0.35),
    "offset": _set(causal=1),
    "not causal": _set(causal=None),
    "window": _set(window=4),
    "softcap": _set(softcap=50.0),
    "empty rows are NaN": _set(empty_row="nan"),
    "empty rows are means": _set(empty_row="uniform"),
    "mask dropped": lambda bb, args, attrs: args.pop(),
    "tiled heads": _tiled_heads,
    "query rounded to float16": _cast_to_half,
}


LONG = {"offset", "softcap", "empty rows are means", "tiled heads"}  # like others of them


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in MUTANTS]
)
def test_a_wrong_rewrite_is_an_error(name):
    mod = module(layers=1)
    report = Report()

    @tvm.transform.module_pass(opt_level=0, name="Wrong")
    def wrong(mod, _):
        return edited(mod, MUTANTS[name])

    with collect() as found:
        checked(wrong, run_on_host, report)(mod)
    assert [d.code for d in found] == ["rewrite-changes-values"]
    assert "Wrong changed the value of" in found[0].message
    assert found[0].function == "main"
    assert len(report.rewrite_checks) == 1
    assert Report.from_json(report.to_json()).rewrite_checks == report.rewrite_checks


def test_regions_are_cut_at_what_the_pass_left_alone():
    mod = module()
    regions = changed_regions(mod["main"], LowerAttention()(mod)["main"])
    assert [sorted(v.name.split(".")[0] for v in r.inputs) for r in regions] == [
        ["k", "lv", "lv1", "mask"],
        ["k", "lv4", "lv5", "mask"],
    ]


@I.ir_module
class Twice:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
        with R.dataflow():
            a = R.cos(x)
            b = R.cos(x)
            c = R.multiply(a, b)
            R.output(c)
        return c


@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_branch_is_compared_by_itself(scale):
    """The default of D = 16 is 0.25."""

    @I.ir_module
    class Mod:
        @R.function
        def main(c: R.Tensor((), "bool"), q: R.Tensor((1, 2, 4, 16), "float32")):
            if c:
                y = R.sits.attention(q, q, q, scale=0.25)
                z = R.add(y, q)
            else:
                z = q
            return z

    wrong = edited(Mod, lambda bb, args, attrs: attrs.update(scale=scale or 0.25, window=9))
    (row,) = check_rewrite(Mod, wrong, run_on_host)
    assert (row.difference <= row.limit) == (scale is None), row


def test_two_computations_of_one_value_are_not_taken_for_two_values():
    once = relax.transform.EliminateCommonSubexpr()(Twice)
    rows = check_rewrite(Twice, once, run_on_host)
    assert rows
    assert all(row.difference <= row.limit for row in rows), rows


@I.ir_module
class Places:
    @R.function
    def main(x: R.Tensor((4,), "int64")) -> R.Tensor((4,), "int64"):
        with R.dataflow():
            a = R.arange(0, 4, 1, "int64")
            b = R.add(a, R.const(1, "int64"))
            c = R.arange(0, 4, 1, "int64")
            d = R.add(c, R.const(1, "int64"))
            e = R.add(b, d)
            f = R.add(e, x)
            R.output(f)
        return f


def test_values_without_arguments_are_compared_from_their_start():
    """`a` is no argument: what stood for `b`, and does not read it, computes the same."""
    once = relax.transform.EliminateCommonSubexpr()(Places)
    rows = check_rewrite(Places, once, run_on_host)
    assert rows
    assert all((row.difference, row.limit) == (0.0, 0.5) for row in rows), rows


def test_nothing_changed_nothing_run():
    assert check_rewrite(Twice, Twice, run_on_host) == []


def test_a_region_too_large_to_run_says_so():
    q = relax.Var("q", relax.TensorType((1, 64, 2048, 8), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("main", [q]):
        with bb.dataflow():
            out = bb.emit_output(attention(q, q, q))
        bb.emit_func_output(out)
    mod = bb.get()
    (row,) = check_rewrite(mod, LowerAttention()(mod), run_on_host)
    assert row.draws == 0
    assert "2,147,483,648 bytes" in row.reason

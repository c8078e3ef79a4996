"""check_attention_redundancy against float64 NumPy, on planted redundancy and a trained model."""

import json

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from relax_passes import prune_redundant_heads
from sits_tvm import (
    Config,
    QuantSpec,
    Report,
    SitsError,
    build,
    check_attention_redundancy,
    from_pretrained,
    from_torch,
    lower,
)
from tests.relax_passes.planted_redundancy import (
    Block,
    copy_rows,
    low_rank,
    module,
    random_params,
    zero_output,
)
from tests.trained_models import gemma_file, minilm_folder

BLOCK = Block(heads=4, kv_heads=2, dim=8, hidden=24)


@pytest.fixture(scope="module")
def measured():
    """Layer 0: heads 0 and 1 have one map, head 3 adds nothing, q has rank 5."""
    rng = np.random.default_rng(0)
    params = random_params(BLOCK, rng, layers=2)
    low_rank(BLOCK, params, "q", 5, rng)
    copy_rows(BLOCK, params, "q", 0, 1)
    zero_output(BLOCK, params, 3)
    mod = module(BLOCK, params, layers=2)
    digest = tvm.ir.save_json(mod)
    x = rng.standard_normal((2, 9, 24)).astype("float32")
    result = check_attention_redundancy(mod, params, [x])
    assert tvm.ir.save_json(mod) == digest
    return result, params, x


def maps_and_contributions(params, x, layer=0):
    """float64 (B, H, S, S) and (H, B, S, N) of one layer on its input."""

    def project(name):
        out = x @ params[f"{layer}.{name}.weight"].astype("float64").T
        out = out + params[f"{layer}.{name}.bias"]
        return out.reshape(*x.shape[:2], -1, BLOCK.dim).transpose(0, 2, 1, 3)

    q, k, v = (project(n) for n in "qkv")
    k, v = (np.repeat(a, 2, axis=1) for a in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / BLOCK.dim**0.5
    scores[:, :, ~np.tril(np.ones((9, 9), bool))] = -np.inf
    maps = np.exp(scores - scores.max(-1, keepdims=True))
    maps /= maps.sum(-1, keepdims=True)
    rows = params[f"{layer}.o.weight"].astype("float64").T.reshape(4, 1, BLOCK.dim, -1)
    return maps, (maps @ v).transpose(1, 0, 2, 3) @ rows


def test_planted_redundancy_is_measured(measured):
    first, second = measured[0].rows
    assert first.measured.map_similarity.pair == (0, 1)
    assert first.measured.map_similarity.cosine == pytest.approx(1.0)
    assert second.measured.map_similarity.cosine < 0.95
    assert first.measured.importance[3] == 0
    ranks = {r.name: r.rank for r in first.ranks}
    assert ranks["q"] <= 5
    assert ranks["k"] == ranks["v"] == 16


def test_figures_are_those_of_float64(measured):
    result, params, x = measured
    maps, added = maps_and_contributions(params, x)
    row = result.rows[0].measured
    out = added.sum(0) + params["0.o.bias"]
    after = np.linalg.norm(x + out)
    want = [np.linalg.norm(a) / after for a in added]
    np.testing.assert_allclose(row.importance, want, rtol=1e-5)
    ratio = np.linalg.norm(out, axis=-1) / np.linalg.norm(x, axis=-1)
    assert row.norm_ratio["50%"] == pytest.approx(np.percentile(ratio, 50), rel=1e-5)
    small, visible = maps < 1e-3, np.tril(np.ones((9, 9), bool)).sum() * 8
    mass, cells = row.dropped[1e-3]
    assert mass == pytest.approx(maps[small].sum() / maps.sum(), rel=1e-4)
    assert cells == pytest.approx((~small).sum() / visible)
    assert row.tokens == 18


def test_kept_keys_of_a_uniform_and_of_a_sharp_row():
    from sits_tvm.attention_redundancy.measures import kept_keys

    visible = np.ones((1, 1, 1, 10), bool)
    uniform, sharp = np.full((1, 1, 1, 10), 0.1), np.zeros((1, 1, 1, 10))
    sharp[..., 3] = 1
    assert kept_keys(uniform, visible)[1e-2] == 1.0
    assert kept_keys(sharp, visible)[1e-3] == 0.1


def test_bytes_count_scales(measured):
    """2 key/value heads of 8 + 8 channels: 32 numbers, of 16, 8.5 and 4.5 bits."""
    assert measured[0].rows[0].kv_bytes == {"float16": 64, "int8/32": 34, "int4/32": 18}


def test_prints_that_nothing_was_changed_and_is_json(measured):
    text = str(measured[0])
    assert "main, attention: 2; nothing was changed" in text
    assert "1 of 8 heads move the residual by less than 2%" in text
    assert "int4/32 keys and values: 36 bytes per token for 128" in text
    assert json.loads(measured[0].to_json())["rows"][0]["measured"]["importance"][3] == 0


def test_plots(measured):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = measured[0].plot()
    figure.canvas.draw()
    assert len(figure.axes) == 5
    ranks, heads = figure.axes[:2]
    for axis in (ranks.xaxis, heads.xaxis, heads.yaxis):
        assert all(float(tick).is_integer() for tick in axis.get_ticklocs())


def test_plots_every_projection_where_it_can_be_seen(measured):
    """k and v of one size have ranks near each other."""
    pytest.importorskip("matplotlib").use("Agg")
    *lines, _ = measured[0].plot().axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["q", "k", "v", "o"]
    assert len({line.get_marker() for line in lines}) == 4
    assert len({x for line in lines for x in line.get_xdata()}) == 8


def test_without_inputs_the_weights_alone(rng):
    params = random_params(BLOCK, rng)
    mod = module(BLOCK, params)
    result = check_attention_redundancy(mod, params)
    [row] = result.rows
    assert row.measured is None
    pytest.importorskip("matplotlib").use("Agg")
    assert len(result.plot().axes) == 1
    assert row.weight_similarity.pair is not None
    assert [r.name for r in row.ranks] == ["q", "k", "v", "o"]


def test_weights_that_are_inputs_are_a_reason(rng):
    params = random_params(BLOCK, rng)
    mod = module(BLOCK, params)
    mod["main"] = mod["main"].with_attr("num_input", len(params) + 1)
    result = check_attention_redundancy(mod, {})
    assert "q is made of `0.q.weight`, which is no weight" in result.rows[0].reason
    assert result.rows[0].reason in str(result)


def test_faults_are_named(rng):
    params = random_params(BLOCK, rng)
    mod = module(BLOCK, params)
    with pytest.raises(SitsError, match="no Relax function 'forward'"):
        check_attention_redundancy(mod, params, func="forward")
    with pytest.raises(SitsError, match=r"no parameter `0\.k\.weight` is given"):
        check_attention_redundancy(mod, {n: p for n, p in params.items() if n != "0.k.weight"})
    x = np.zeros((2, 9, 24), "float32")
    for inputs, message in (
        ([], "0 inputs are given; main takes 1: x"),
        (x, r"inputs is a ndarray, not a list of tensors(.|\n)*write inputs=\[x\]"),
        ([x.astype("float64")], r"input `x` has shape \(2, 9, 24\) and dtype float64; main takes"),
        ([x[0]], r"input `x` has shape \(9, 24\)"),
        (["x"], "`x` is a str, not a dense tensor"),
    ):
        with pytest.raises(SitsError, match=message):
            check_attention_redundancy(mod, params, inputs)


@pytest.mark.slow
def test_trained_minilm_has_nothing_that_is_exactly_redundant():
    pytest.importorskip("transformers")
    mod, params = from_pretrained(minilm_folder())
    report = Report()
    out, _ = prune_redundant_heads(mod, params, report=report)
    assert out.same_as(mod)
    assert len(report.attention_rewrites) == 12
    assert not any(row.changed for row in report.attention_rewrites)
    ids = np.random.default_rng(0).integers(999, 20000, (2, 48))
    result = check_attention_redundancy(mod, params, [ids, np.ones_like(ids)])
    assert len(result.rows) == 6
    assert all(r.rank > r.break_even for row in result.rows for r in row.ranks)
    assert min(i for row in result.rows for i in row.measured.importance) > 0


@pytest.mark.slow
def test_trained_gemma_has_nothing_that_is_exactly_redundant():
    pytest.importorskip("transformers")
    mod, params = from_pretrained(gemma_file())
    report = Report()
    out, _ = prune_redundant_heads(mod, params, report=report)
    assert out.same_as(mod)
    assert len(report.attention_rewrites) == 36
    assert not any(row.changed for row in report.attention_rewrites)


@pytest.fixture
def with_dead_head(rng):
    block = Block(heads=4, kv_heads=4, dim=16, hidden=32)
    params = random_params(block, rng)
    zero_output(block, params, 2)
    return module(block, params), params, rng.standard_normal((1, 5, 32)).astype("float32")


def test_a_build_prunes_what_is_exactly_redundant(with_dead_head):
    mod, params, x = with_dead_head
    results = []
    for attention, rows in {"exact": 48, "off": 64}.items():
        ex = build(mod, "llvm", params=params, config=Config(attention=attention))
        assert ex.params["0.q.weight"].shape == (rows, 32)
        assert params["0.q.weight"].shape == (64, 32)
        results.append(relax.VirtualMachine(ex, tvm.cpu())["main"](x, *ex.param_list).numpy())
    np.testing.assert_allclose(*results, rtol=0, atol=2e-6 * np.abs(results[0]).max())


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_of_torch(need_weights):
    """One packed product for q, k and v, heads folded into the batch."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            return x + self.a(x, x, x, need_weights=need_weights)[0]

    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 6, 32)
    with torch.no_grad():
        model.a.out_proj.weight[:, 8:16] = 0
        want, maps = model(x).numpy(), model.a(x, x, x, average_attn_weights=False)[1].numpy()
    mod, params = from_torch(model, (x,))
    row = check_attention_redundancy(mod, params, [x]).rows[0]
    flat = np.moveaxis(maps, 1, 0).reshape(4, -1)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    cosine = (flat @ flat.T - np.eye(4)).max()
    assert row.measured.map_similarity.cosine == pytest.approx(cosine, rel=1e-5)
    assert [n for n, i in enumerate(row.measured.importance) if i == 0] == [1]
    assert row.measured.norm_ratio["50%"] == pytest.approx(
        np.median(np.linalg.norm(want - x.numpy(), axis=-1) / np.linalg.norm(x, axis=-1)), rel=1e-5
    )
    ex = build(mod, "llvm", params=params)
    assert {row.binding for row in ex.report.attention_rewrites if row.rule != "views"} == {
        ex.report.attention[0].binding
    }
    assert ex.params["a.in_proj_weight.q"].shape == (24, 32)
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](x.numpy(), *ex.param_list).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_what_is_left_is_packed(with_dead_head):
    mod, params, _ = with_dead_head
    config = Config(quant=QuantSpec(group_size=32))
    _, report = lower(mod, "llvm", params=params, config=config)
    assert {w.name: w.shape for w in report.quantized}["0.q.weight"] == (48, 32)
    assert [row.changed for row in report.attention_rewrites if row.rule == "heads"] == [True]

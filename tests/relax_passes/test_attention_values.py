"""relax.sits.attention: numbers against its definition in float64 NumPy, and torch."""

import numpy as np
import pytest
import tvm
from attention_calls import module, tensor
from small_modules import run_main
from tvm import relax, tirx

torch = pytest.importorskip("torch")


def draw(*shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def reference(q, k, v, bias=None, *, scale=None, offset=None, window=0, softcap=0.0, empty="nan"):
    """Per query row, in float64, straight from the definition: no mask tensor, no broadcasting."""
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    scale = width**-0.5 if scale is None else scale
    out = np.zeros((batch, heads, queries, v.shape[3]))
    bias = None if bias is None else np.broadcast_to(bias, (batch, heads, queries, keys))
    for b, h, i in np.ndindex(batch, heads, queries):
        g, position = h // (heads // kv_heads), i + (offset or 0)
        seen = [
            j
            for j in range(keys)
            if (offset is None or j <= position)
            and (window == 0 or position - window < j)
            and (bias is None or bias.dtype != bool or bias[b, h, i, j])
        ]
        if not seen:
            mean = v[b, g].mean(axis=0, dtype="float64")
            out[b, h, i] = {"nan": np.nan, "zero": 0.0, "uniform": mean}[empty]
            continue
        score = k[b, g, seen].astype("float64") @ q[b, h, i].astype("float64") * scale
        score = softcap * np.tanh(score / softcap) if softcap else score
        score = score + bias[b, h, i, seen] if bias is not None and bias.dtype != bool else score
        weight = np.exp(score - score.max())
        out[b, h, i] = weight / weight.sum() @ v[b, g, seen].astype("float64")
    return out


CASES = {
    "plain": ((2, 4, 5, 8), (2, 4, 5, 8), 8, {}),
    "causal": ((2, 4, 7, 8), (2, 4, 7, 8), 8, {"causal": 0}),
    "gqa 14/2": ((2, 14, 5, 8), (2, 2, 5, 8), 8, {"causal": 0}),
    "mqa 8/1": ((2, 8, 5, 8), (2, 1, 5, 8), 8, {"causal": 0, "window": 3}),
    "dv != d": ((1, 6, 4, 8), (1, 3, 4, 8), 5, {"causal": 0, "scale": 0.7}),
    "decode": ((1, 4, 1, 8), (1, 2, 9, 8), 8, {"causal": "bottom_right", "window": 4}),
    "chunk": ((1, 4, 3, 8), (1, 2, 9, 8), 8, {"causal": "bottom_right", "window": 4}),
    "offset": ((1, 2, 4, 8), (1, 2, 9, 8), 8, {"causal": 2}),
    "window of one": ((1, 2, 6, 8), (1, 2, 6, 8), 8, {"causal": 0, "window": 1}),
    "window, not causal": ((1, 2, 6, 8), (1, 2, 6, 8), 8, {"window": 2}),
    "window never reached": ((1, 2, 6, 8), (1, 2, 6, 8), 8, {"causal": 0, "window": 99}),
    "softcap": ((2, 4, 5, 8), (2, 2, 5, 8), 8, {"causal": 0, "softcap": 0.5}),
    "more queries": ((1, 2, 7, 8), (1, 2, 4, 8), 8, {"causal": "bottom_right"}),
    "negative offset": ((1, 4, 5, 8), (1, 2, 5, 8), 8, {"causal": -2}),
}
STATIC = ("decode", "window never reached", "more queries")


@pytest.mark.parametrize(
    ("name", "dynamic"), [(n, True) for n in CASES] + [(n, False) for n in STATIC]
)
def test_equals_float64_definition(name, dynamic):
    q_shape, k_shape, width, attributes = CASES[name]
    q, k, v = draw(*q_shape), draw(*k_shape, seed=1), draw(*k_shape[:3], width, seed=2)
    b, s, t = (
        (tirx.Var(n, "int64") for n in "bst") if dynamic else (q.shape[0], q.shape[2], k.shape[2])
    )
    types = [tensor(b, x.shape[1], n, x.shape[3]) for x, n in ((q, s), (k, t), (v, t))]
    offset = attributes.get("causal")
    offset = k.shape[2] - q.shape[2] if offset == "bottom_right" else offset
    plain = {name: value for name, value in attributes.items() if name != "causal"}
    got = run_main(module(*types, **attributes), q, k, v)
    np.testing.assert_allclose(got, reference(q, k, v, offset=offset, **plain), atol=2e-6)


@pytest.mark.parametrize("empty_row", ["nan", "zero", "uniform"])
def test_empty_rows_are_what_was_asked_for(empty_row):
    q, k, v = draw(1, 4, 5, 8), draw(1, 2, 3, 8, seed=1), draw(1, 2, 3, 6, seed=2)
    types = [tensor(*x.shape) for x in (q, k, v)]
    got = run_main(module(*types, causal="bottom_right", empty_row=empty_row), q, k, v)
    np.testing.assert_allclose(got, reference(q, k, v, offset=-2, empty=empty_row), atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((), "float32"),
        ((6,), "bool"),
        ((5, 6), "bool"),
        ((5, 6), "float32"),
        ((2, 1, 5, 6), "bool"),
        ((1, 4, 1, 6), "float32"),
        ((2, 4, 5, 1), "float32"),
    ],
)
def test_bias_broadcasts(shape, kind):
    q, k, v = draw(2, 4, 5, 8), draw(2, 2, 6, 8, seed=1), draw(2, 2, 6, 8, seed=2)
    bias = np.asarray(draw(*shape, seed=3), "float32")
    bias = bias > -0.8 if kind == "bool" else bias
    types = [tensor(*x.shape) for x in (q, k, v)] + [tensor(*shape, dtype=kind)]
    got = run_main(module(*types, empty_row="zero", softcap=3.0), q, k, v, np.asarray(bias))
    want = reference(q, k, v, np.asarray(bias), empty="zero", softcap=3.0)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_infinite_bias_and_garbage_behind_the_mask():
    """Scores of -1e30 stay finite, and NaN in a masked key never reaches a visible one."""
    q, k, v = np.full((1, 1, 3, 4), -1e15, "float32"), draw(1, 1, 3, 4), draw(1, 1, 3, 4, seed=1)
    k[:] = [[[[1e15] * 4, [1.0] * 4, [np.nan] * 4]]]
    bias = np.array([[0, -np.inf, -np.inf], [0, -1e30, -np.inf], [-np.inf] * 3], "float32")
    types = [tensor(*x.shape) for x in (q, k, v)] + [tensor(3, 3)]
    got = run_main(module(*types, empty_row="zero", causal=0), q, k, v, bias)
    assert np.isfinite(got[0, 0, 0]).all()
    np.testing.assert_allclose(got[0, 0, 0], v[0, 0, 0], rtol=1e-6)


def test_an_infinite_bias_hides_a_key_of_nan():
    """As if the key were not there."""
    q, k, v = draw(1, 2, 3, 4), draw(1, 1, 5, 4, seed=1), draw(1, 1, 5, 4, seed=2)
    bias = draw(3, 5, seed=3)
    k[:, :, 4], bias[:, 4] = np.nan, -np.inf
    types = [tensor(*x.shape) for x in (q, k, v, bias)]
    got = run_main(module(*types), q, k, v, bias)
    want = reference(q, k[:, :, :4], v[:, :, :4], bias[:, :4])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_equals_torch_in_each_dtype(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 6, 8).to(getattr(torch, dtype)) for h in (4, 2, 2))
    mod = module(*(tensor(*x.shape, dtype=dtype) for x in (q, k, v)), causal=0)
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    got = vm["main"](q, k, v)
    double = [x.double() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    want = sdpa(*double, is_causal=True, enable_gqa=True)
    assert got.dtype == q.dtype
    ulps = 2 if dtype in ("float16", "bfloat16") else 8
    assert (got.double() - want).abs().max() <= ulps * torch.finfo(q.dtype).eps * v.abs().max()


@pytest.mark.parametrize(("empty_row", "value"), [("zero", 0.0), ("nan", np.nan)])
def test_no_keys_is_an_empty_row(empty_row, value):
    """TIR leaves the result of a reduction over nothing unset, so this needs code of its own."""
    s, t = tirx.Var("s", "int64"), tirx.Var("t", "int64")
    types = tensor(1, 4, s, 8), tensor(1, 2, t, 8), tensor(1, 2, t, 8)
    got = run_main(
        module(*types, causal=0, empty_row=empty_row), draw(1, 4, 5, 8), *[draw(1, 2, 0, 8)] * 2
    )
    np.testing.assert_array_equal(got, np.full((1, 4, 5, 8), value, "float32"))


@pytest.mark.parametrize("keys", [5, 0])
def test_no_queries(keys):
    s, t = tirx.Var("s", "int64"), tirx.Var("t", "int64")
    mod = module(tensor(1, 4, s, 8), tensor(1, 2, t, 8), tensor(1, 2, t, 8), causal=0)
    k = draw(1, 2, keys, 8)
    assert run_main(mod, draw(1, 4, 0, 8), k, k).shape == (1, 4, 0, 8)


def test_scores_in_half_precision_under_a_softmax_in_single():
    """The bias is added in float16, as T5 does: 2049 + 2 is 2052 there, 2048 + 2 is 2050."""
    q, k, v = (draw(1, 2, 4, 8, dtype="float16", seed=n) for n in range(3))
    q, k = np.round(q), np.round(k)
    bias = (2048 + 8 * draw(1, 2, 4, 4, seed=4)).astype("float16")
    given = {"scale": 1.0, "scores_dtype": "float16"}
    types = [tensor(*x.shape, dtype="float16") for x in (q, k, v, bias)]
    found = run_main(module(*types, **given), q, k, v, bias)
    scores = torch.from_numpy(q) @ torch.from_numpy(k).mT + torch.from_numpy(bias)
    want = torch.softmax(scores.float(), -1).half() @ torch.from_numpy(v)
    np.testing.assert_allclose(found, want.numpy(), rtol=2e-3, atol=2e-3)

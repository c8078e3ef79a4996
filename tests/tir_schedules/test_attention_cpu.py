"""The fused attention kernel for CPUs against float64 NumPy: every form, every extent, no leaks."""

import numpy as np
import pytest
from attention_runs import compile_attention, reference, static_types, symbolic_types

INF = float("inf")


def draw(*shape, seed=0, dtype="float32"):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def operands(batch, heads, kv_heads, queries, keys, width, value_width=None, dtype="float32"):
    return [
        draw(batch, heads, queries, width, dtype=dtype),
        draw(batch, kv_heads, keys, width, seed=1, dtype=dtype),
        draw(batch, kv_heads, keys, value_width or width, seed=2, dtype=dtype),
    ]


def check(types, *cases, atol=3e-6, name="host", **attributes):
    run = compile_attention(types(cases[0]), name, **attributes)
    for arrays in cases:
        want = reference(*arrays, **attributes)
        np.testing.assert_allclose(run(*arrays), want, atol=atol, rtol=2e-6)


LENGTHS = [(0, 5), (1, 1), (1, 0), (3, 0), (1, 9), (5, 5), (9, 1), (24, 70), (70, 24), (130, 130)]


def slow(*values):
    """A case that others cover in part; each compiles a kernel."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "attributes",
    [
        slow({}),
        slow({"causal": 0}),
        slow({"causal": "bottom_right", "empty_row": "zero"}),
        {"causal": "bottom_right", "window": 7, "empty_row": "uniform"},
        slow({"causal": 3, "window": 2, "softcap": 0.7}),
        slow({"causal": -2, "scale": 1.0, "empty_row": "zero"}),
        slow({"window": 4}),
    ],
    ids=str,
)
def test_every_length(attributes):
    """One function for all lengths, 0 included; 14 query heads on 2, Dv other than D."""
    cases = [operands(2, 14, 2, s, t, 12, 7) for s, t in LENGTHS]
    check(symbolic_types, cases[3], *cases, **attributes)


@pytest.mark.parametrize("name", ["haswell", slow("generic")])
def test_other_targets(name):
    cases = [operands(1, 3, 1, s, t, 9, 20) for s, t in LENGTHS]
    check(symbolic_types, cases[3], *cases, name=name, causal="bottom_right", empty_row="zero")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"), [slow(3, 3, 2), slow(28, 4, 1), slow(8, 1, 1), (71, 1, 1)]
)
def test_static_shapes(heads, kv_heads, queries):
    arrays = operands(2, heads, kv_heads, queries, 67, 16)
    check(static_types, arrays, causal="bottom_right")


@pytest.mark.parametrize("extents", [(1, 0, 4), (1, 3, 0), (0, 3, 4)])
def test_static_shapes_of_nothing(extents):
    """No queries, keys or batch: what is divided by is a constant 0."""
    batch, queries, keys = extents
    check(static_types, operands(batch, 4, 2, queries, keys, 8), empty_row="uniform")


@pytest.mark.parametrize(("width", "value_width"), [slow(1, 3), (47, 80)])
def test_odd_head_dimensions(width, value_width):
    cases = [operands(1, 6, 2, s, 50, width, value_width) for s in (1, 40)]
    check(symbolic_types, *cases)


BIASES = [
    slow((), "bool"),
    slow((40,), "float16"),
    (("s", 40), "bool"),
    ((2, 1, 1, 40), "float32"),
    slow((1, 6, 1, 1), "float32"),
    slow((2, 6, "s", 1), "float32"),
    slow((2, 6, "s", 40), "float32"),
]


@pytest.mark.parametrize(("shape", "kind"), BIASES, ids=str)
def test_bias_of_any_shape(shape, kind):
    cases = []
    for queries in (33, 1):
        extents = [queries if n == "s" else n for n in shape]
        bias = np.asarray(draw(*extents, seed=3))
        bias = np.asarray(bias > -0.8) if kind == "bool" else bias.astype(kind)
        cases.append([*operands(2, 6, 3, queries, 40, 8), bias])
    check(symbolic_types, *cases, causal="bottom_right", softcap=3.0, empty_row="zero")


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("empty_row", [slow("nan"), slow("zero"), "uniform"])
@pytest.mark.parametrize("kind", ["bool", slow("-inf"), slow("lowest")])
def test_empty_rows(queries, empty_row, kind):
    """Some rows, and all rows of a tile, see nothing."""
    visible = draw(1, 1, queries, 150, seed=5) > 0
    visible[..., :100] = False
    visible[..., : (queries + 1) // 2, :] = False
    fill = {"bool": None, "-inf": -INF, "lowest": np.finfo("float32").min}[kind]
    bias = visible if fill is None else np.where(visible, 0, fill).astype("float32")
    arrays = [*operands(1, 4, 2, queries, 150, 8), bias]
    check(static_types, arrays, causal=0 if queries > 1 else None, empty_row=empty_row)


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("masked_by", ["causal", slow("bool"), "-inf"])
def test_hidden_keys_do_not_matter(queries, masked_by):
    """NaN, infinities and huge numbers in keys that a query does not see, and in their values;
    but a float bias of -inf hides the key alone: its value is multiplied by 0."""
    keys, offset = 90, 6
    q, k, v = operands(1, 4, 2, queries, keys, 16)
    visible = np.arange(keys) <= np.arange(queries)[:, None] + offset
    infinite = np.where(visible, 0.5, -INF).astype("float32")
    bias = {"causal": [], "bool": [visible], "-inf": [infinite]}[masked_by]
    attributes = {} if bias else {"causal": offset}
    run = compile_attention(static_types([q, k, v, *bias]), **attributes)
    clean = run(q, k, v, *bias)
    for garbage in (np.nan, INF, -INF, 3e38):
        for first in (7, 60, keys - 1):
            dirty_k, dirty_v = k.copy(), v.copy()
            dirty_k[:, :, first:] = garbage
            dirty_v[:, :, first:] = v[:, :, first:] if masked_by == "-inf" else garbage
            rows = max(0, first - offset)
            got = run(q, dirty_k, dirty_v, *bias)[:, :, :rows]
            np.testing.assert_array_equal(got, clean[:, :, :rows])


@pytest.mark.parametrize("queries", [1, 20])
def test_visible_nan_and_infinity_arrive(queries):
    q, k, v = operands(1, 2, 1, queries, 100, 8)
    k[0, 0, 70, 3] = np.nan
    run = compile_attention(static_types([q, k, v]))
    assert np.isnan(run(q, k, v)).all()
    q, k, v = operands(1, 2, 1, queries, 100, 8)
    v[0, 0, 70, 3] = INF
    got = run(q, k, v)
    assert np.isposinf(got[..., 3]).all()
    assert np.isfinite(np.delete(got, 3, 3)).all()


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("shift", [-200.0, slow(200.0), slow(-1e30)])
def test_scores_far_from_zero(queries, shift):
    """Neither exp nor the correction between tiles overflows, or makes 0 / 0."""
    q, k, v = operands(1, 2, 1, queries, 200, 8)
    q[..., 0] = 1.0
    k[..., 0] = np.where(np.arange(200) % 7 == 3, shift, shift * 1.5)
    check(static_types, [q, k, v], scale=1.0, causal="bottom_right", atol=2e-4)


@pytest.mark.parametrize("queries", [1, 20])
def test_float16(queries):
    arrays = operands(2, 6, 2, queries, 130, 24, 40, dtype="float16")
    check(symbolic_types, arrays, causal="bottom_right", atol=1e-3)

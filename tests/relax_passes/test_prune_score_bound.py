"""PruneRedundantAttention: how large scores of normalized queries and keys can get."""

import numpy as np
import pytest
from pruning import function, prune, tensor
from tvm import relax, tirx
from tvm.relax import op as R

from relax_passes.op import attention

S = tirx.Var("s", "int64")


def normed(emit, x, weight, power=False):
    square = emit(R.power(x, relax.const(2.0)) if power else R.multiply(x, x))
    mean = emit(R.mean(square, axis=-1, keepdims=True))
    root = emit(R.rsqrt(emit(R.add(mean, relax.const(1e-6)))))
    return emit(R.multiply(weight, emit(R.multiply(x, root))))


def rotated(emit, x, table):
    """As most models do: the two halves are the two coordinates."""
    half = int(x.ty.shape[-1]) // 2
    first, second = (
        emit(R.strided_slice(x, [3], [b], [b + half], assume_inbound=True)) for b in (0, half)
    )
    angle = emit(R.concat([table, table], axis=-1))
    cos, sin = (emit(R.expand_dims(emit(f(angle)), 0)) for f in (R.cos, R.sin))
    turned = emit(R.concat([emit(R.negative(second)), first], axis=-1))
    return emit(R.add(emit(R.multiply(x, cos)), emit(R.multiply(turned, sin))))


def normalized_attention(power=False, turn=rotated, scale=0.25):
    """RMSNorm with constant weights over 16 elements, in (B, S, H, D), then a rotation."""
    rng = np.random.default_rng(0)
    weights = [relax.const(rng.standard_normal(16).astype("float32")) for _ in "qk"]

    def make(emit, q, k, v, table):
        heads = []
        for x, weight in zip((q, k), weights, strict=True):
            x = normed(emit, x, weight, power)
            x = emit(R.permute_dims(x, [0, 2, 1, 3]))
            heads.append(turn(emit, x, table))
        return attention(*heads, v, scale=scale)

    types = tensor(1, S, 4, 16), tensor(1, S, 2, 16), tensor(1, 2, S, 16), tensor(1, S, 8)
    largest = [float(np.abs(w.value.numpy()).max()) for w in weights]
    return function(make, *types), 16 * largest[0] * largest[1] * abs(scale)


@pytest.mark.parametrize("power", [False, True])
def test_the_bound_of_normalized_scores_is_a_fact(power):
    mod, bound = normalized_attention(power)
    out, rows = prune(mod, "score-bound")
    assert out.same_as(mod)
    assert [row.changed for row in rows] == [False]
    assert rows[0].reason == (
        f"fact: |score| ≤ {bound:.4g}, from the RMS norms of q and k over 16 elements"
    )


def test_scores_that_are_turned_otherwise_have_no_bound():
    def sheared(emit, x, table):
        return emit(R.add(x, emit(R.flip(x, 3))))

    mod, _ = normalized_attention(turn=sheared)
    assert prune(mod, "score-bound") == (mod, [])


def test_the_bound_holds_and_is_reached():
    """q and k along the heaviest element: |score| is scale · D · max|γ_q| · max|γ_k|."""
    gamma = np.random.default_rng(1).standard_normal((2, 16))
    along = np.eye(16)[np.abs(gamma).argmax(axis=1)] * 1e4
    normed_ = along / np.sqrt((along**2).mean(axis=1, keepdims=True)) * gamma
    assert np.abs(normed_).max(axis=1).prod() == pytest.approx(
        16 * np.abs(gamma).max(axis=1).prod()
    )

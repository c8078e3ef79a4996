"""Training after prepare_qat recovers loss that rounding costs."""

import numpy as np
import pytest
import qat_training as training

from sits_tvm import Config, QuantSpec, convert_qat, prepare_qat


def test_training_recovers_what_rounding_costs_on_digits():
    """W3, groups of 32: deployed loss on held-out digits of rounding, and of training; two seeds.

    Float32 is trained as long as the quantized model. `bench_qat` does more of the same.
    """
    pytest.importorskip("sklearn")
    x, labels = training.digits()
    spec, model = QuantSpec(bits=3, group_size=32), training.mlp((64, 64, 32, 10), 128)
    steps, losses = {}, []

    def batches(seed):
        draw = np.random.default_rng(seed)
        while True:
            picked = draw.integers(0, 1408, 128)
            yield x[picked], labels[picked]

    def train(mod, params, seed, rate):
        if len(mod["main"].params) not in steps:
            step = training.gradient_function(mod, model.rows, model.classes, list(params))
            steps[len(mod["main"].params)] = step

        def rates(t, name):
            return rate(t) * (0.1 if name.endswith(".scale") else 1)

        training.adam(params, steps[len(mod["main"].params)], batches(seed), rates, 150)

    def loss(mod, params, config=None):
        logits = training.logits_of(mod, params, config)
        parts = [slice(i, i + 128) for i in range(1408, 1792, 128)]
        return np.mean([training.cross_entropy(logits(x[p]), labels[p]) for p in parts])

    for seed in (0, 1):
        params = model.initial(np.random.default_rng(seed))
        train(model.mod, params, 2 * seed, lambda t: 1e-2 * (1 - 0.7 * t))
        mod, learned = prepare_qat(model.mod, spec, params=params)
        learned = training.copied(learned)
        train(model.mod, params, 2 * seed + 1, lambda t: 3e-3 * (1 - t))
        train(mod, learned, 2 * seed + 1, lambda t: 3e-3 * (1 - t))
        rounded = loss(model.mod, params, Config(quant=spec))
        losses.append((loss(model.mod, params), rounded, loss(*convert_qat(mod, learned, spec))))
    full, rounded, aware = np.mean(losses, axis=0)
    print(f"fp32 {full:.4f}, rounded {rounded:.4f}, trained {aware:.4f}")
    assert rounded > full + 0.02  # rounding costs something that can be recovered
    assert rounded - aware >= 0.7 * (rounded - full)

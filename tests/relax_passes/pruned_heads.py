"""Models with planted redundancy before and after prune_redundant_heads, in float64."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.prune_redundant_heads import prune_redundant_heads
from sits_tvm import Report
from sits_tvm.gradient_check.twin import Twin
from tests.relax_passes.planted_redundancy import (
    Block,
    copy_rows,
    module,
    pack,
    random_params,
)

BLOCKS = {
    "mha": Block(),
    "mha packed": Block(packed=True, bias=False),
    "rope": Block(rope=True, bias=False),
    "gqa": Block(kv_heads=2, rope=True),
    "mqa": Block(kv_heads=1, rope=True),
    "gqa packed": Block(heads=6, kv_heads=2, packed=True),
}


def planted(block, plant, rng, layers=1):
    params = random_params(block, rng, layers)
    plant(params)
    params = pack(block, params)
    return module(block, params, layers), params


def pruned(mod, params, **options):
    report, digest = Report(), tvm.ir.save_json(mod)
    out, left = prune_redundant_heads(mod, params, report=report, **options)
    relax.analysis.well_formed(out)
    assert tvm.ir.save_json(mod) == digest
    return out, left, report.attention_rewrites


def heads_of(mod):
    """(H, G, Dv) of every attention."""
    found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op == tvm.ir.Op.get("relax.sits.attention"):
            q, _, v = expr.args[:3]
            found.append((int(q.ty.shape[1]), int(v.ty.shape[1]), int(v.ty.shape[3])))

    relax.analysis.post_order_visit(mod["main"], visit)
    return sorted(found)


def same_numbers(mod, params, out, left, block, rng, tolerance=1e-6):
    """In float64: what is left is the rounding of changed weights to their dtype."""
    x = rng.standard_normal((2, 5, block.hidden))
    mask = np.ones((2, 1, 1, 5), bool)
    mask[0, :, :, 3:] = False
    inputs = [x, mask] if block.padding else [x]
    results = [in_float64(m, inputs, p) for m, p in ((mod, params), (out, left))]
    np.testing.assert_allclose(*results, rtol=0, atol=tolerance * np.abs(results[0]).max())


def in_float64(mod, inputs, params):
    torch = pytest.importorskip("torch")
    names = [a.name for a in mod["main"].params[len(inputs) :]]
    args = [*inputs, *(params[name].astype("float64") for name in names)]
    return Twin(mod, "main").run([torch.from_numpy(a) for a in args]).outputs.detach().numpy()


def powers(block, rng):
    return 2.0 ** rng.integers(-3, 4, block.dim) * rng.choice([-1, 1], block.dim)


def copy_map(block, params, source, target, rng):
    """The same map, spelled differently: per dimension, or with rotary embedding as a whole."""
    scale = -4.0 if block.rope else powers(block, rng)
    order = None if block.rope else rng.permutation(block.dim)
    ratio = block.heads // block.kv_heads
    copy_rows(block, params, "q", source, target, scale, order)
    if ratio == 1:
        copy_rows(block, params, "k", source, target, 1 / np.asarray(scale), order)


def copy_values(block, params, source, target, rng):
    copy_rows(block, params, "v", source, target, powers(block, rng), rng.permutation(block.dim))

"""Inputs of reported faults of quantization elsewhere, through the recognised pattern."""

import numpy as np
import pytest
import quantize_reference as reference
import tvm
from quantize_forms import add_function, const
from tvm import relax

from relax_passes.fix_quantize_gradient import FixQuantizeGradient

INF = np.inf
TIES = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
A = [-4.3, -4.0, -0.3, 0.6, 3.4, 3.5, 3.9, 10]
B = [-2, -1.4, 0.2, 1.1, 5.9, 6.1, 6.4, 9]
EDGES = [0, 1, 1, 1, 1, 1, 0, 0]
RANGES = {"int4": (-8, 7), "narrow": (-7, 7), "uint4": (0, 15)}
# x, scale, zero point, range, upstream gradient or None for ones; y, dx, ds
FAULTS = {
    "A": (A, 0.5, 0, "int4", None, [-4, -4, -0.5, 0.5, 3.5, 3.5, 3.5, 3.5], EDGES, 5.6),
    "B": (B, 0.5, 3, "uint4", None, [-1.5, -1.5, 0, 1, 6, 6, 6, 6], EDGES, 20.2),
    "1 infinities": ([INF, -INF, 1], 1, 0, "int4", None, [7, -8, 1], [0, 0, 1], -1),
    "3 mask of the clamped code": ([-9, 0, 8], 1, 0, "int4", None, [-8, 0, 7], [0, 1, 0], -1),
    "5 scale from dx": ([10, 0.3], 0.5, 0, "int4", [2, 1], [3.5, 0.5], [0, 1], 14.4),
    "11 ties": (TIES, 1, 0, "int4", None, [0, 2, 2, 0, -2, -2], [1] * 6, 0),
    "11 ties, odd zero point": (
        TIES, 1, 1, "uint4", None, [0, 2, 2, 0, -1, -1], [1, 1, 1, 1, 0, 0], -2,
    ),
    "13 full range": (
        [-8, -7.6, -7.4, 7.4, 7.6], 1, 0, "int4", None, [-8, -8, -7, 7, 7], [1, 1, 1, 1, 0], 6.6,
    ),
    "13 narrow range": (
        [-8, -7.6, -7.4, 7.4, 7.6], 1, 0, "narrow", None, [-7, -7, -7, 7, 7], [0, 0, 1, 1, 0], -7,
    ),
    "13 amax / 7.5": ([3, -1, 1], 0.4, 0, "int4", None, [2.8, -0.8, 0.8], [0, 1, 1], 7),
    "14 group": ([1, 2, 3, 4], 0.5, 0, "int4", None, [1, 2, 3, 3.5], [1, 1, 1, 0], 7),
    "16 lower bound": ([-2, -1.4], 0.5, 3, "uint4", None, [-1.5, -1.5], [0, 1], -3.2),
    "16 small": ([-2e-4, -1.4e-4], 0.5e-4, 3, "uint4", None, [-1.5e-4] * 2, [0, 1], -3.2),
    "22 truncated": (
        [1.2, 2.7, -3.1, 0.4], 1, 0, "int4", [0.3, -0.9, 1.7, 200], [1, 3, -3, 0],
        [0.3, -0.9, 1.7, 200], -0.2 * 0.3 - 0.3 * 0.9 + 0.1 * 1.7 - 0.4 * 200,
    ),
    "8 transposed": (
        (np.arange(12).reshape(3, 4) - 6).T, [[1], [2], [4], [0.5]], 0, "int4",
        np.arange(12).reshape(4, 3),
        [[-6, -2, 2], [-4, 0, 4], [-4, 0, 4], [-3, 1, 3.5]],
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 0]], [[0], [6], [0], [77]],
    ),
}  # fmt: skip


def spell(zero, bounds):
    def through_integers(b, x, s, g):
        codes = b.round(b.divide(x, s))
        codes = b.add(codes, const(float(zero))) if zero else codes
        codes = b.astype(b.clip(codes, *bounds), "int8")
        wide = b.astype(codes, "float32")
        wide = b.subtract(wide, const(float(zero))) if zero else wide
        return b.sum(b.multiply(b.multiply(wide, s), g))

    return through_integers


def names():
    return {fault: f"f{i}" for i, fault in enumerate(FAULTS)}


@pytest.fixture(scope="module")
def machine():
    bb = relax.BlockBuilder()
    for fault, name in names().items():
        x, scale, zero, kind, *_ = FAULTS[fault]
        types = [(np.shape(x), "float32"), (np.shape(scale), "float32"), (np.shape(x), "float32")]
        add_function(bb, name, spell(zero, RANGES[kind]), types)
    mod = FixQuantizeGradient()(bb.get())
    for name in names().values():
        mod = relax.transform.Gradient(name)(mod)
    return relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())


def run(machine, fault, g):
    """y, dx and ds for the upstream gradient g; y is the gradient of the loss to g."""
    x, scale, *_ = FAULTS[fault]
    args = [np.array(a, "float32", order="C") for a in (x, scale, g)]
    _, (dx, ds, y) = machine[f"{names()[fault]}_adjoint"](*map(tvm.runtime.tensor, args))
    return y.numpy(), dx.numpy(), ds.numpy()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_values_of_the_table(machine, fault):
    x, _, _, _, g, y, dx, ds = FAULTS[fault]
    got_y, got_dx, got_ds = run(machine, fault, np.ones(np.shape(x)) if g is None else g)
    np.testing.assert_allclose(got_y, y, rtol=1e-6)
    np.testing.assert_allclose(got_dx, dx, rtol=1e-6)
    np.testing.assert_allclose(got_ds, ds, rtol=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
def test_signs_and_magnitudes_of_the_upstream_gradient(machine, fault):
    """Alternating, from 1e-6 to 1e3, against float64: ones hide faults of sign and order."""
    x, scale, zero, kind, *_ = FAULTS[fault]
    x, scale = (np.array(a, "float32", order="C") for a in (x, scale))
    g = (10.0 ** np.linspace(-6, 3, x.size)).reshape(x.shape).astype("float32")
    g.ravel()[::2] *= -1
    group_size = -1 if scale.ndim else None
    grid = reference.Grid(group_size=group_size, signed=zero == 0, narrow_range=kind == "narrow")
    zeros = np.full(scale.shape, zero)
    want_dx, want_ds, _ = reference.gradients(g, x, scale, zeros, grid)
    terms, _ = reference.magnitudes(g, x, scale, zeros, grid)
    _, dx, ds = run(machine, fault, g)
    np.testing.assert_array_equal(dx, want_dx.astype("float32"))
    assert (np.abs(ds - want_ds) <= 1e-6 * terms).all()

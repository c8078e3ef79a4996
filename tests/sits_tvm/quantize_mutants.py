"""Wrong gradients and wrong kernels of fake quantization, to see that a checker refuses them.

All are variations of one composition of Relax ops for w (N, K) with groups along K, a scale and a
float zero point of shape (N, K / g), signed 4-bit codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from tvm import relax
from tvm.ir import Op
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.op import fake_quantize

NAME = "relax.sits.fake_quantize"
BATCH, ROWS, COLUMNS, GROUP = 4, 8, 64, 8  # as many groups as rows, so that axes can be confused
GROUPS = COLUMNS // GROUP


@dataclass(frozen=True)
class Mutant:
    """What is done differently from the right rule.

    `change` maps the terms before they are summed, `summed` the gradients after; both take and
    return a namespace with dx, ds, dz. `forward` puts the same variation into the kernel too.
    """

    name: str
    change: Callable[[SimpleNamespace], None] = lambda t: None
    summed: Callable[[SimpleNamespace], None] = lambda t: None
    lo: int = -8
    rounding: str = "even"
    reciprocal: bool = False
    add_then_round: bool = False
    forward: bool = False


def const(value: float) -> relax.Expr:
    return relax.const(value, "float32")


def half_away(x: relax.Expr) -> relax.Expr:
    return R.multiply(R.sign(x), R.floor(R.add(R.abs(x), const(0.5))))


def terms(args: list[relax.Expr], mutant: Mutant) -> SimpleNamespace:
    """x, s, z of shape (N, K/g, g or 1), and what follows from them."""
    x, s, z = args
    t = SimpleNamespace(lo=float(mutant.lo), hi=7.0, z=R.expand_dims(z, -1))
    t.x, t.s = R.reshape(x, (ROWS, GROUPS, GROUP)), R.expand_dims(s, -1)
    ratio = R.multiply(t.x, R.divide(const(1.0), t.s)) if mutant.reciprocal else R.divide(t.x, t.s)
    rounded = half_away if mutant.rounding == "away" else R.round
    t.zp = R.minimum(R.maximum(R.round(t.z), const(t.lo)), const(t.hi))
    t.v, t.r = ratio, rounded(ratio)
    t.u = R.add(t.r, t.zp)
    if mutant.add_then_round:
        t.u = rounded(R.add(ratio, t.zp))
        t.r = R.subtract(t.u, t.zp)
    t.q = R.minimum(R.maximum(t.u, const(t.lo)), const(t.hi))
    t.inside = between(t.u, t)
    return t


def between(u: relax.Expr, t: SimpleNamespace) -> relax.Expr:
    return R.logical_and(R.greater_equal(u, const(t.lo)), R.less_equal(u, const(t.hi)))


def gradient(mutant: Mutant) -> Callable:
    """An FPrimalGradient of `fake_quantize`."""

    def rule(_var, call, gy, _bb):
        t = terms(list(call.args), mutant)
        t.gy, t.axis, zero = R.reshape(gy, (ROWS, GROUPS, GROUP)), -1, const(0.0)
        t.dx = R.where(t.inside, t.gy, zero)
        t.ds = R.multiply(t.gy, R.where(t.inside, R.subtract(t.r, t.v), R.subtract(t.q, t.zp)))
        t.dz = R.multiply(t.gy, R.where(t.inside, zero, R.negative(t.s)))
        mutant.change(t)
        t.ds, t.dz = R.sum(t.ds, [-1]), R.sum(t.dz, [-1])
        mutant.summed(t)
        return [R.reshape(t.dx, (ROWS, COLUMNS)), t.ds, t.dz]

    return rule


@mutator
class Kernel(PyExprMutator):
    """Computes every `fake_quantize` by the composition of a mutant."""

    def __init__(self, mod, mutant: Mutant) -> None:
        super().__init__(mod)
        self.mutant = mutant

    def visit_call_(self, call):
        call = super().visit_call_(call)
        if call.op != Op.get(NAME):
            return call
        t = terms(list(call.args), self.mutant)
        return R.reshape(R.multiply(R.subtract(t.q, t.zp), t.s), (ROWS, COLUMNS))


def identity(t):
    t.dx = t.gy


def _clamped_mask(t):
    t.dx, t.ds, t.dz = t.gy, R.multiply(t.gy, R.subtract(t.r, t.v)), R.multiply(t.dz, const(0.0))


def _from_dx(t):
    t.ds = R.multiply(t.dx, R.subtract(t.r, t.v))


def _without_r(t):
    t.ds = R.multiply(t.gy, R.where(t.inside, R.negative(t.v), R.subtract(t.q, t.zp)))


def _without_v(t):
    t.ds = R.multiply(t.gy, R.subtract(t.q, t.zp))


def _code_for_level(t):
    t.ds = R.multiply(t.gy, R.where(t.inside, R.subtract(t.r, t.v), t.q))


def _transposed(t):
    t.ds, t.dz = R.permute_dims(t.ds), R.permute_dims(t.dz)


def _interleaved(t):
    swap = lambda x: R.permute_dims(R.reshape(x, (ROWS, GROUP, GROUPS)), [0, 2, 1])  # noqa: E731
    t.ds, t.dz = swap(t.ds), swap(t.dz)


def _scale_dropped(t):
    t.dz = R.multiply(t.gy, R.where(t.inside, const(0.0), const(-1.0)))


def _through(dtype):
    def change(t):
        t.dx = R.astype(R.astype(t.dx, dtype), "float32")

    return change


def _scaled(name, factor):
    def change(t):
        setattr(t, name, R.multiply(getattr(t, name), const(factor)))

    return change


def _all_scaled(factor):
    def change(t):
        for name in ("dx", "ds", "dz"):
            _scaled(name, factor)(t)

    return change


def _one_sided(t):
    t.dx = R.where(R.less_equal(t.u, const(t.hi)), t.gy, const(0.0))


def _unrounded_mask(t):
    t.dx = R.where(between(R.add(t.v, t.zp), t), t.gy, const(0.0))


def _strict_mask(t):
    u = R.add(t.v, t.zp)
    strict = R.logical_and(R.greater(u, const(t.lo)), R.less(u, const(t.hi)))
    t.dx = R.where(strict, t.gy, const(0.0))


def _unrounded_zero_point(t):
    t.ds = R.multiply(t.gy, R.where(t.inside, R.subtract(t.r, t.v), R.subtract(t.q, t.z)))


RIGHT = Mutant("right rule, composed")
MUTANTS = (
    Mutant("identity", identity),
    Mutant("mask from the clamped code", _clamped_mask),
    Mutant("ds from dx", _from_dx),
    Mutant("ds without the rounded part", _without_r),
    Mutant("ds without x / s", _without_v),
    Mutant("ds from the code, not the level", _code_for_level),
    Mutant("ds with the zero point unrounded", _unrounded_zero_point),
    Mutant("scale detached", _scaled("ds", 0.0)),
    Mutant("ds divided by sqrt(N Qp)", _scaled("ds", 1 / math.sqrt(GROUP * 7))),
    Mutant("ds averaged", _scaled("ds", 1 / GROUP)),
    Mutant("reduced over the wrong axis", summed=_transposed),
    Mutant("groups interleaved", _interleaved),
    Mutant("dz missing", _scaled("dz", 0.0)),
    Mutant("dz without the scale", _scale_dropped),
    Mutant("dz of the wrong sign", _scaled("dz", -1.0)),
    Mutant("dx of the wrong sign", _scaled("dx", -1.0)),
    Mutant("gradient zero", _all_scaled(0.0)),
    Mutant("gradient times sqrt(batch)", _all_scaled(math.sqrt(BATCH))),
    Mutant("adjoint through int8", _through("int8")),
    Mutant("adjoint through float16", _through("float16")),
    Mutant("mask at the upper end only", _one_sided),
    Mutant("mask before rounding", _unrounded_mask),
    Mutant("mask of the LSQ paper", _strict_mask),
    Mutant("range -7…7 in the gradient", lo=-7),
    Mutant("half away from zero in the gradient", rounding="away"),
    Mutant("reciprocal in the gradient", reciprocal=True),
    Mutant("zero point added before rounding", add_then_round=True),
    Mutant("range -7…7", lo=-7, forward=True),
    Mutant("half away from zero", rounding="away", forward=True),
    Mutant("reciprocal", reciprocal=True, forward=True),
)


def model(name: str):
    """A linear layer with weights in groups, and a loss that is no multiple of its output."""
    bb = relax.BlockBuilder()
    tensor = lambda *shape: relax.TensorType(shape, "float32")  # noqa: E731
    shapes = {
        "x": (BATCH, COLUMNS), "w": (ROWS, COLUMNS), "s": (ROWS, GROUPS), "z": (ROWS, GROUPS)
    }  # fmt: skip
    x, w, s, z = params = [relax.Var(n, tensor(*shape)) for n, shape in shapes.items()]
    with bb.function(name, params, {"num_input": 1}):
        with bb.dataflow():
            quantized = bb.emit(fake_quantize(w, s, z, group_size=GROUP))
            y = bb.emit(R.matmul(x, bb.emit(R.permute_dims(quantized))))
            loss = bb.emit_output(R.mean(R.multiply(R.tanh(y), y)))
        bb.emit_func_output(loss)
    return bb.get()

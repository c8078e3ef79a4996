"""Relax expressions a transformer needs, each with inputs and the same expression in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tvm import relax
from tvm.relax import op as O

F32, F16, I64 = "float32", "float16", "int64"
END = 2**63 - 1


@dataclass(frozen=True)
class Input:
    """A tensor: normal floats, or integers in [low, high). "n" stands for the free extent."""

    shape: tuple[int | str, ...]
    dtype: str = F32
    low: int = 0
    high: int = 50

    def shape_at(self, n: object) -> list:
        return [n if extent == "n" else extent for extent in self.shape]

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        if self.dtype == I64:
            return rng.integers(self.low, self.high, self.shape_at(n))
        return rng.standard_normal(self.shape_at(n)).astype(self.dtype)


@dataclass(frozen=True)
class Case:
    build: Callable[..., relax.Expr]
    reference: Callable[..., object]
    inputs: tuple[Input, ...]

    @property
    def is_symbolic(self) -> bool:
        return any("n" in each.shape for each in self.inputs)

    @property
    def tolerance(self) -> float:
        return 2e-3 if any(each.dtype == F16 for each in self.inputs) else 2e-5


def const(value: float, dtype: str = F32) -> relax.Expr:
    return relax.const(value, dtype)


def _half_turn(x: relax.Expr, half: int) -> relax.Expr:
    low, high = O.strided_slice(x, [3], [0], [half]), O.strided_slice(x, [3], [half], [END])
    return O.concat([O.negative(high), low], axis=3)


def _rotary(half: int) -> Case:
    def build(x: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
        return O.add(O.multiply(x, cos), O.multiply(_half_turn(x, half), sin))

    def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    table = Input((1, 1, "n", 2 * half))
    return Case(build, reference, (Input((1, 3, "n", 2 * half)), table, table))


def _rms(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    mean = O.mean(O.power(x, const(2.0)), [-1], keepdims=True)
    return O.multiply(O.multiply(x, O.rsqrt(O.add(mean, const(1e-6)))), w)


def _residual_norm(x: relax.Expr, y: relax.Expr, w: relax.Expr) -> relax.Expr:
    total = O.add(x, y)
    return O.add(total, O.nn.rms_norm(total, w, [-1]))


def _causal(x: relax.Expr) -> relax.Expr:
    position = O.arange(0, 37, 1, I64)
    seen = O.less_equal(O.expand_dims(position, 0), O.expand_dims(position, 1))
    return O.where(seen, x, const(-1e9))


def _sigmoid_gradient(x: relax.Expr) -> relax.Expr:
    y = O.sigmoid(x)
    return O.multiply(O.multiply(y, O.subtract(const(1.0), y)), x)


def _split_product(x: relax.Expr) -> relax.Expr:
    parts = O.split(x, 2, 1)
    return O.multiply(parts[0], parts[1])


_row, _wide, _vec = Input(("n", 37)), Input(("n", 48)), Input((40,))
_int = Input(("n", 37), I64)
_cube, _square = Input((2, "n", 37)), Input((2, "n", "n"))
_state = Input((2, "n", 40))

ELEMENTWISE = {
    "add": Case(O.add, torch.add, (_row, _row)),
    "add_fp16": Case(O.add, torch.add, (Input(("n", 37), F16),) * 2),
    "relu": Case(O.nn.relu, F.relu, (_row,)),
    "leaky_relu": Case(lambda x: O.nn.leakyrelu(x, 0.1), lambda x: F.leaky_relu(x, 0.1), (_row,)),
    "gelu": Case(O.nn.gelu, F.gelu, (_row,)),
    "gelu_fp16": Case(O.nn.gelu, F.gelu, (Input(("n", 37), F16),)),
    "gelu_tanh_mul": Case(
        lambda x, y: O.multiply(O.nn.gelu_tanh(x), y),
        lambda x, y: F.gelu(x, approximate="tanh") * y,
        (_row, _row),
    ),
    "silu_mul_fp16": Case(
        lambda x, y: O.multiply(O.nn.silu(x), y),
        lambda x, y: F.silu(x) * y,
        (Input(("n", 48), F16),) * 2,
    ),
    "sigmoid_gradient": Case(
        _sigmoid_gradient, lambda x: x.sigmoid() * (1 - x.sigmoid()) * x, (_wide,)
    ),
    "softplus": Case(O.nn.softplus, F.softplus, (_row,)),
    "power": Case(lambda x: O.power(x, const(3.0)), lambda x: x**3, (_row,)),
    "power_general": Case(
        lambda x, y: O.power(O.abs(x), y), lambda x, y: x.abs() ** y, (_row,) * 2
    ),
    "clip_floor": Case(
        lambda x: O.clip(O.floor(O.multiply(x, const(3.0))), -2, 2),
        lambda x: (x * 3).floor().clamp(-2, 2),
        (_row,),
    ),
    "where": Case(
        lambda x, y: O.where(O.greater(x, y), x, O.negative(y)),
        lambda x, y: torch.where(x > y, x, -y),
        (_row, _row),
    ),
    "less": Case(O.less, torch.lt, (_row, _row)),
    "logical": Case(
        lambda x, y: O.logical_not(O.logical_and(O.less(x, y), O.greater(x, const(0.0)))),
        lambda x, y: ~((x < y) & (x > 0)),
        (_row, _row),
    ),
    "cast_fp16": Case(lambda x: O.astype(O.astype(x, F16), F32), lambda x: x.half(), (_row,)),
    "cast_float64": Case(
        lambda x: O.exp(O.astype(x, "float64")), lambda x: x.double().exp(), (_row,)
    ),
    "floor_divide": Case(
        lambda x: O.floor_divide(x, const(3, I64)), lambda x: x // 3, (Input(("n", 37), I64, -50),)
    ),
    "floor_mod": Case(
        lambda x: O.floor_mod(x, const(3, I64)), lambda x: x % 3, (Input(("n", 37), I64, -50),)
    ),
    "shift_mask": Case(
        lambda x: O.bitwise_and(O.right_shift(x, const(1, I64)), const(7, I64)),
        lambda x: (x >> 1) & 7,
        (_int,),
    ),
    "quantize": Case(
        lambda x: O.quantize(x, const(0.125), const(3, "int8"), out_dtype="int8", axis=-1),
        lambda x: torch.clamp(torch.round(x / 0.125) + 3, -128, 127),
        (_row,),
    ),
    "dequantize": Case(
        lambda x: O.dequantize(O.astype(x, "int8"), const(0.1), const(3, "int8"), axis=-1),
        lambda x: (x - 3) * 0.1,
        (_int,),
    ),
    "one_axis": Case(O.exp, torch.exp, (Input(("n",)),)),
    "scalar": Case(O.exp, torch.exp, (Input(()),)),
    "one_long_row": Case(O.exp, torch.exp, (Input((1, 1, 32768)),)),
}

ROWS = {
    "softmax": Case(lambda x: O.nn.softmax(x, -1), lambda x: torch.softmax(x, -1), (_square,)),
    "softmax_axis_1": Case(lambda x: O.nn.softmax(x, 1), lambda x: torch.softmax(x, 1), (_cube,)),
    "softmax_fp16": Case(
        lambda x: O.nn.softmax(x, -1), lambda x: torch.softmax(x, -1), (Input((2, "n", 64), F16),)
    ),
    "softmax_one_row": Case(
        lambda x: O.nn.softmax(x, -1), lambda x: torch.softmax(x, -1), (Input((1, 32768)),)
    ),
    "log_softmax": Case(
        lambda x: O.nn.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1), (_cube,)
    ),
    "rms_norm": Case(
        lambda x, w: O.nn.rms_norm(x, w, [-1]),
        lambda x, w: F.rms_norm(x, (40,), w, 1e-5),
        (_state, _vec),
    ),
    "rms_norm_fp16": Case(
        lambda x, w: O.nn.rms_norm(x, w, [-1]),
        lambda x, w: F.rms_norm(x, (64,), w, 1e-5),
        (Input((2, "n", 64), F16), Input((64,), F16)),
    ),
    "rms_norm_spelled_out": Case(_rms, lambda x, w: F.rms_norm(x, (40,), w, 1e-6), (_state, _vec)),
    "residual_norm": Case(
        _residual_norm,
        lambda x, y, w: x + y + F.rms_norm(x + y, (40,), w, 1e-5),
        (_state, _state, _vec),
    ),
    "layer_norm": Case(
        lambda x, w, b: O.nn.layer_norm(x, w, b, [-1]),
        lambda x, w, b: F.layer_norm(x, (40,), w, b, 1e-5),
        (_state, _vec, _vec),
    ),
    "layer_norm_two_axes": Case(
        lambda x, w, b: O.nn.layer_norm(x, w, b, [-2, -1]),
        lambda x, w, b: F.layer_norm(x, (6, 40), w, b, 1e-5),
        (Input(("n", 6, 40)), Input((6, 40)), Input((6, 40))),
    ),
    "group_norm": Case(
        lambda x, w, b: O.nn.group_norm(x, w, b, 2, 1, [2]),
        lambda x, w, b: F.group_norm(x, 2, w, b, 1e-5),
        (Input((2, 8, "n")), Input((8,)), Input((8,))),
    ),
    "mean": Case(lambda x: O.mean(x, -1), lambda x: x.mean(-1), (_row,)),
    "variance": Case(lambda x: O.variance(x, -1), lambda x: x.var(-1, correction=0), (_row,)),
    "log_sum_exp": Case(lambda x: O.log(O.sum(O.exp(x), -1)), lambda x: x.logsumexp(-1), (_row,)),
    "sum_all": Case(O.sum, torch.sum, (_row,)),
    "sum_axis_0": Case(lambda x: O.sum(x, 0), lambda x: x.sum(0), (_row,)),
    "sum_axis_0_static": Case(lambda x: O.sum(x, 0), lambda x: x.sum(0), (Input((300, 640)),)),
    "sum_axis_1": Case(lambda x: O.sum(x, 1), lambda x: x.sum(1), (_cube,)),
    "sum_axes_0_2": Case(lambda x: O.sum(x, [0, 2]), lambda x: x.sum((0, 2)), (_cube,)),
    "sum_int": Case(lambda x: O.sum(x, -1), lambda x: x.sum(-1), (_int,)),
    "product": Case(lambda x: O.prod(x, -1), lambda x: x.prod(-1), (_row,)),
    "min": Case(lambda x: O.min(x, -1), lambda x: x.amin(-1), (_row,)),
    "max_axis_0": Case(lambda x: O.max(x, 0), lambda x: x.amax(0), (Input((23, 37)),)),
    "argmax": Case(lambda x: O.argmax(x, -1), lambda x: x.argmax(-1), (_row,)),
    "any": Case(
        lambda x, y: O.astype(O.max(O.astype(O.less(x, y), "int8"), -1, True), "bool"),
        lambda x, y: (x < y).any(-1, True),
        (_row, _row),
    ),
    "column_sum_used_by_all": Case(
        lambda x: O.divide(x, O.sum(O.exp(x), 0, True)),
        lambda x: x / x.exp().sum(0, True),
        (_wide,),
    ),
    "two_outputs": Case(
        lambda x: relax.Tuple([O.exp(x), O.sum(x, -1)]), lambda x: (x.exp(), x.sum(-1)), (_wide,)
    ),
    "cross_entropy": Case(
        lambda x, i: O.nn.nll_loss(O.nn.log_softmax(x, -1), i),
        F.cross_entropy,
        (Input((9, 37)), Input((9,), I64, 0, 37)),
    ),
}

LAYOUT = {
    "rotary": _rotary(16),
    "rotary_odd_half": _rotary(10),
    "slice_with_step": Case(
        lambda x: O.strided_slice(x, [1], [0], [37], [2]), lambda x: x[:, ::2], (_row,)
    ),
    "concat_axis_0": Case(
        lambda x, y: O.concat([x, y], 0), lambda x, y: torch.cat([x, y]), (_row, _row)
    ),
    "concat_axis_1": Case(
        lambda x, y: O.concat([x, y], 1), lambda x, y: torch.cat([x, y], 1), (_row, _wide)
    ),
    "take": Case(
        lambda t, i: O.take(t, i, axis=0), lambda t, i: t[i], (Input((50, 33)), Input(("n",), I64))
    ),
    "take_2d_scaled": Case(
        lambda t, i: O.multiply(O.take(t, i, axis=0), const(25.3)),
        lambda t, i: t[i] * 25.3,
        (Input((50, 48)), Input((2, "n"), I64)),
    ),
    "take_last_axis": Case(
        lambda t, i: O.take(t, i, axis=1),
        lambda t, i: t[:, i],
        (Input((5, 50)), Input(("n",), I64)),
    ),
    "gather_elements": Case(
        lambda x, i: O.gather_elements(x, i, 1),
        lambda x, i: x.gather(1, i),
        (_row, Input(("n", 5), I64, 0, 37)),
    ),
    "scatter_elements": Case(
        lambda x, i, u: O.scatter_elements(x, i, u, 1),
        lambda x, i, u: x.scatter(1, i, u),
        (Input((9, 37)), Input((9, 1), I64, 0, 37), Input((9, 1))),
    ),
    "cumsum": Case(lambda x: O.cumsum(x, 1), lambda x: x.cumsum(1), (Input((3, 23)),)),
    "arange": Case(
        lambda x: O.add(x, O.arange(0, 37, 1, I64)), lambda x: x + torch.arange(37), (_int,)
    ),
    "tril": Case(O.tril, torch.tril, (_square,)),
    "triu": Case(lambda x: O.triu(x, 1), lambda x: x.triu(1), (_cube,)),
    "causal_mask": Case(
        _causal,
        lambda x: torch.where(torch.arange(37)[None] <= torch.arange(37)[:, None], x, -1e9),
        (Input(("n", 37, 37)),),
    ),
    "full": Case(lambda x: O.add(x, O.full((37,), const(3.0), F32)), lambda x: x + 3, (_row,)),
    "repeat_heads": Case(
        lambda x: O.repeat(x, 3, 1), lambda x: x.repeat_interleave(3, 1), (Input((1, 2, "n", 16)),)
    ),
    "tile": Case(lambda x: O.tile(x, [1, 3]), lambda x: x.repeat(1, 3), (Input(("n", 7)),)),
    "flip": Case(lambda x: O.flip(x, 1), lambda x: x.flip(1), (_row,)),
    "stack": Case(
        lambda x, y: O.stack([x, y], 1), lambda x, y: torch.stack([x, y], 1), (_row, _row)
    ),
    "pad": Case(lambda x: O.nn.pad(x, [0, 0, 2, 3]), lambda x: F.pad(x, (2, 3)), (_row,)),
    "transpose": Case(lambda x: O.permute_dims(x, [1, 0]), lambda x: x.T, (_row,)),
    "swap_heads": Case(
        lambda x: O.permute_dims(x, [0, 2, 1, 3]),
        lambda x: x.transpose(1, 2),
        (Input((1, "n", 4, 16)),),
    ),
    "split": Case(lambda x: O.split(x, [20], 1), lambda x: x.split([20, 28], 1), (_wide,)),
    "split_product": Case(_split_product, lambda x: x[:, :24] * x[:, 24:], (_wide,)),
    "topk": Case(
        lambda x: O.topk(x, 3, -1, "values"), lambda x: x.topk(3, -1).values, (Input((5, 37)),)
    ),
    "sort": Case(lambda x: O.sort(x, -1), lambda x: x.sort(-1).values, (Input((5, 37)),)),
}

PRODUCTS = {
    "matmul": Case(O.matmul, torch.matmul, (Input(("n", 33)), Input((33, 20)))),
    "matmul_nt": Case(
        lambda x, w: O.matmul(x, O.permute_dims(w, [1, 0])),
        lambda x, w: x @ w.T,
        (Input(("n", 33)), Input((20, 33))),
    ),
    "einsum": Case(
        lambda x, y: O.einsum((x, y), "bik,bjk->bij"),
        lambda x, y: torch.einsum("bik,bjk->bij", x, y),
        (Input((2, 6, 16)), Input((2, 9, 16))),
    ),
    "conv2d_relu": Case(
        lambda x, w: O.nn.relu(O.nn.conv2d(x, w, padding=1)),
        lambda x, w: F.relu(F.conv2d(x, w, padding=1)),
        (Input((1, 3, 8, 9)), Input((4, 3, 3, 3))),
    ),
    "max_pool2d": Case(
        lambda x: O.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        (Input((1, 3, 9, 9)),),
    ),
    "avg_pool2d": Case(
        lambda x: O.nn.avg_pool2d(x, (2, 2), (2, 2)),
        lambda x: F.avg_pool2d(x, 2),
        (Input((1, 3, 8, 8)),),
    ),
}

ZOO = ELEMENTWISE | ROWS | LAYOUT | PRODUCTS

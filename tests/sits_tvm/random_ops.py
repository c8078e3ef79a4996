"""The operations of random_modules: each takes a value, and adds what it computes to the pool.

An operation that cannot take the value does nothing.
"""

from __future__ import annotations

import numpy as np
import tvm
from random_modules import EXTENTS, FLOATS, Draft, Function, Value, rounded, to_dtype
from tvm import relax, te, tirx

from relax_passes import op as int4

R = relax.op


def unary(d: Draft, x: Value) -> None:
    options = {"negative": np.negative, "abs": np.abs}
    if x.is_float:
        relu, sigmoid = lambda a: np.maximum(a, 0), lambda a: 1 / (1 + np.exp(-a))
        options |= {"tanh": np.tanh, "sigmoid": sigmoid, "nn.relu": relu}
    if x.dtype == "bool":
        return
    name = d.one_of(options)
    d.emit(_op(name)(x.expr), options[name], x)


def _op(name):
    return R.nn.relu if name == "nn.relu" else getattr(R, name)


BINARY = ("add", "subtract", "multiply", "maximum", "minimum")


def binary(d: Draft, x: Value) -> None:
    """With a value of its type (itself, if there is no other), or with a constant."""
    if x.dtype == "bool":
        return
    name = d.one_of(BINARY)
    others = [
        v for v in d.function.pool
        if v.dtype == x.dtype and v.array.shape == x.array.shape and v.dims == x.dims
    ]  # fmt: skip
    others = [v for v in others if None not in v.dims or v is x]
    if d.one_of((True, False)):
        y = d.one_of(others)
        d.emit(getattr(R, name)(x.expr, y.expr), getattr(np, name), x, y)
        return
    last = x.dims[-1:] if x.dims and x.dims[-1] is not None else []
    shape = d.one_of(((), tuple(last)))
    held = rounded(d.rng.integers(-3, 4, shape), x.dtype)
    y = relax.const(tvm.runtime.tensor(to_dtype(held, x.dtype)))
    d.emit(getattr(R, name)(x.expr, y), lambda a: getattr(np, name)(a, held), x)


def product(d: Draft, x: Value) -> None:
    """By a weight, in several spellings; twice, with one weight, if it is drawn."""
    if not x.is_float or not x.dims or x.dims[-1] is None:
        return
    k, n = x.dims[-1], d.one_of((8, 1, 33, 64, 0, *((x.dims[-1],) if x.dims[-1] else ())))
    out_dtype = d.one_of((None, "float32"))
    spelling = d.one_of(("kn", "permuted", "linear", "bias", "left", "einsum"))
    if spelling == "kn":
        w = d.weight((k, n), x.dtype, "kn")
        d.emit(R.matmul(x.expr, w.expr, out_dtype=out_dtype), np.matmul, x, w)
        return
    w = d.weight((n, k), x.dtype, "nk")
    if spelling == "left" and len(x.dims) == 2:
        turned = d.bb.emit(R.permute_dims(x.expr))
        d.emit(R.matmul(w.expr, turned, out_dtype=out_dtype), lambda a, b: b @ a.T, x, w)
    elif spelling == "einsum" and len(x.dims) == 2:
        d.emit(R.einsum([x.expr, w.expr], "mk,nk->mn"), lambda a, b: a @ b.T, x, w)
    elif spelling in ("linear", "bias"):
        b = d.vector(n, x.dtype) if spelling == "bias" else None
        d.emit(
            R.linear(x.expr, w.expr, b.expr if b else None),
            lambda a, w, *b: a @ w.T + (b[0] if b else 0),
            *((x, w, b) if b else (x, w)),
        )
    else:
        turned = d.bb.emit(R.permute_dims(w.expr))
        d.emit(R.matmul(x.expr, turned, out_dtype=out_dtype), lambda a, b: a @ b.T, x, w)


def embedding(d: Draft, _: Value) -> None:
    """Rows of a table, and the product by the same table."""
    dtype = d.one_of(FLOATS)
    table = d.weight((33, d.one_of((8, 64))), dtype, "nk")
    ids = d.input((d.one_of(("n", 1, 5)),), d.one_of(("int32", "int64")), high=33)
    rows = d.emit(R.take(table.expr, ids.expr, axis=0), lambda w, i: w[i], table, ids)
    if d.one_of((True, False)):
        turned = d.bb.emit(R.permute_dims(table.expr))
        d.emit(R.matmul(rows.expr, turned), lambda a, w: a @ w.T, rows, table)


def cast(d: Draft, x: Value) -> None:
    to = d.one_of(FLOATS)
    d.emit(R.astype(x.expr, to), lambda a: a, x)


def shapes(d: Draft, x: Value) -> None:
    rank, kind = len(x.dims), d.one_of(("permute", "concat", "expand", "split", "flat", "slice"))
    axis = d.random.randint(0, rank - 1) if rank else 0
    if kind == "expand" or not rank:
        d.emit(R.expand_dims(x.expr, 0), lambda a: a[None], x)
    elif kind == "permute":
        axes = [*range(1, rank), 0]
        d.emit(R.permute_dims(x.expr, axes), lambda a: a.transpose(axes), x)
    elif kind == "concat":
        d.emit(R.concat([x.expr, x.expr], axis), lambda a: np.concatenate([a, a], axis), x)
    elif kind == "split" and x.dims[axis] is not None and x.dims[axis] > 1:
        at = d.random.randint(1, x.dims[axis] - 1)
        parts = d.bb.emit(R.split(x.expr, [at], axis))
        for i in (0, 1):
            d.emit(parts[i], lambda a, i=i: np.split(a, [at], axis)[i], x)
    elif kind == "flat":
        d.emit(R.flatten(x.expr), np.ravel, x)
    elif x.dims[axis]:
        end = d.random.randint(0, x.dims[axis])
        d.emit(
            R.strided_slice(x.expr, [axis], [0], [end]),
            lambda a: a.take(np.arange(end), axis),
            x,
        )


def reduce(d: Draft, x: Value) -> None:
    if not x.is_float or not x.dims:
        return
    axis = d.random.randint(0, len(x.dims) - 1)
    name = d.one_of(("sum", "mean", "max") if x.dims[axis] else ("sum",))
    keep = d.one_of((True, False))
    d.emit(
        getattr(R, name)(x.expr, axis, keep),
        lambda a: getattr(np, name)(a, axis=axis, keepdims=keep),
        x,
    )


def normalize(d: Draft, x: Value) -> None:
    if not x.is_float or not x.dims or not x.dims[-1]:
        return
    kind, length = d.one_of(("softmax", "layer_norm", "rms_norm")), x.dims[-1]
    if kind == "softmax":
        d.emit(R.nn.softmax(x.expr, -1), _softmax, x)
        return
    scale, shift = d.vector(length, x.dtype), d.vector(length, x.dtype)
    if kind == "rms_norm" and len(x.dims) == 1:
        return  # TVM cannot
    if kind == "rms_norm":

        def rms(a, s):
            return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-2) * s

        d.emit(R.nn.rms_norm(x.expr, scale.expr, -1, 1e-2), rms, x, scale)
        return

    def layer(a, s, b):
        return (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-2) * s + b

    d.emit(R.nn.layer_norm(x.expr, scale.expr, shift.expr, -1, 1e-2), layer, x, scale, shift)


def _softmax(a):
    e = np.exp(a - a.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


def branch(d: Draft, x: Value) -> None:
    """If, which no dataflow block may hold."""
    if d.function.in_dataflow or x.dtype == "bool":
        return
    cond = d.input((), "bool")
    chosen = relax.If(cond.expr, R.negative(x.expr), R.add(x.expr, x.expr))
    d.emit(chosen, lambda c, a: -a if c else a + a, cond, x)


def where(d: Draft, x: Value) -> None:
    """A comparison of integers chooses."""
    if x.dtype not in ("int32", "int64", "int8"):
        return
    high = d.bb.emit(R.greater(x.expr, relax.const(np.int64(0), x.dtype)))
    zeros = R.zeros_like(x.expr)
    d.emit(R.where(high, x.expr, zeros), lambda a: np.maximum(a, 0), x)


def integers(d: Draft, _: Value) -> None:
    dims = tuple(d.one_of(("n", *EXTENTS)) for _ in range(2))
    d.input(dims, d.one_of(("int32", "int64", "int8")))


def another_input(d: Draft, _: Value) -> None:
    dims = tuple(d.one_of(("n", "m", *EXTENTS)) for _ in range(d.one_of((2, 3, 4, 0))))
    d.input(dims, d.one_of(FLOATS))


def kernel(d: Draft, x: Value) -> None:
    """call_tir of a PrimFunc."""
    if not x.is_float or not x.dims:
        return

    def halved(a):
        return te.compute(a.shape, lambda *i: a(*i) * tirx.const(0.5, a.dtype), name="halved")

    d.bound(d.bb.emit_te(halved, x.expr), lambda a: a * 0.5, x)


def match_cast(d: Draft, x: Value) -> None:
    """The first extent gets a name of its own."""
    if not x.dims:
        return
    fresh = tirx.Var(f"c{len(d.function.pool)}", "int64")
    type_ = relax.TensorType([fresh, *list(x.expr.ty.shape)[1:]], x.dtype)
    d.bound(d.bb.match_cast(x.expr, type_), lambda a: a, x)


def attention(d: Draft, _: Value) -> None:
    dtype, heads, depth = d.one_of(("float32", "float16")), d.one_of((1, 3)), d.one_of((8, 3, 16))
    batch, queries, keys = d.one_of((1, 2, 0)), d.one_of(("n", 5, 1)), d.one_of((5, 1, "m", 17))
    q = d.input((batch, heads, queries, depth), dtype)
    k, v = (d.input((batch, heads, keys, depth), dtype) for _ in range(2))
    if not k.array.shape[2]:
        return  # NaN says the attention op of no keys, 0 a product over none
    turned = d.bb.emit(R.permute_dims(k.expr, [0, 1, 3, 2]))
    scores = d.bb.emit(R.matmul(q.expr, turned))
    scale = relax.const(np.asarray(0.25, dtype))
    scores = d.bb.emit(R.multiply(scores, scale))
    mask = np.zeros((1, 1, 1, 1))
    if queries == 5 and keys == 5 and d.one_of((True, False)):
        mask = np.where(np.tri(5), 0, -1e4)[None, None]
        scores = d.bb.emit(R.add(scores, relax.const(mask.astype(dtype))))
    weights = d.bb.emit(R.nn.softmax(scores, -1))

    def reference(q, k, v):
        return _softmax(q @ k.swapaxes(-1, -2) / 4 + mask) @ v

    d.emit(R.matmul(weights, v.expr), reference, q, k, v)


def quantize(d: Draft, _: Value) -> None:
    """QDQ of an input, with TVM's ops; a scale and a zero point per column."""
    columns = d.one_of((8, 33, 1))
    x = d.input((d.one_of(("n", 3, 0)), columns), "float32")
    scale = rounded(d.rng.uniform(0.05, 0.1, columns), "float32")
    zero = d.rng.integers(-5, 5, columns)
    s, z = relax.const(scale.astype("float32")), relax.const(zero.astype("int8"))
    q = d.bb.emit(R.quantize(x.expr, s, z, axis=1, out_dtype="int8"))

    def reference(a):
        ratio = (a.astype("float32") / scale.astype("float32")).astype("float64")
        return (np.clip(np.round(ratio) + zero, -128, 127) - zero) * scale

    d.emit(R.dequantize(q, s, z, axis=1, out_dtype="float32"), reference, x)


def fake_quantize(d: Draft, x: Value) -> None:
    """A product by a weight as QAT writes it: 4 bits, a scale per output channel."""
    if x.dtype != "float32" or not x.dims or not x.dims[-1]:
        return
    k, n = x.dims[-1], d.one_of((8, 1, 33))
    w = d.weight((n, k), "float32", "faked")
    scale = rounded(d.rng.uniform(0.05, 0.1, n), "float32").astype("float32")
    faked = d.bb.emit(int4.fake_quantize(w.expr, relax.const(scale), bits=4, axis=0))

    def reference(a, w):
        ratio = (w.astype("float32") / scale[:, None]).astype("float64")
        return a @ (np.clip(np.round(ratio), -8, 7) * scale[:, None]).T

    d.emit(R.matmul(x.expr, d.bb.emit(R.permute_dims(faked))), reference, x, w)


def call_helper(d: Draft, _: Value) -> None:
    """A call of the private function, with a new input."""
    assert d.helper is not None
    gvar, inner = d.helper
    x = d.input(("n", 8), "float32")
    d.emit(relax.Call(gvar, [x.expr]), inner, x)


def make_helper(d: Draft) -> None:
    """helper(x (n, 8)) -> tanh(x) + x"""
    d.function = Function("helper")
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 8), "float32"))
    with d.bb.function("helper", [x], private=True):
        with d.bb.dataflow():
            out = d.bb.emit_output(R.add(R.tanh(x), x))
        d.bb.emit_func_output(out)
    d.helper = d.bb.get().get_global_var("helper"), lambda a: np.tanh(a) + a


OPS = (
    product, unary, binary, product, cast, shapes, reduce, normalize, branch, where, integers,
    another_input, kernel, match_cast, attention, quantize, fake_quantize, embedding, call_helper,
)  # fmt: skip

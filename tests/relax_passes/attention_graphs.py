"""Random graphs of attention, most of them right, some with one thing wrong, for hypothesis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from tvm import IRModule, relax, tirx
from tvm.relax import op as R

LOWEST = float(torch.finfo(torch.float32).min)
FAULTS = ("axis", "tiled", "gate", "mask-multiplied", "scale-last", "other-fill")


@dataclass(frozen=True)
class Form:
    """A graph: sizes, and what is written where. `fault`: what makes it another function."""

    batch: int
    num_heads: int
    num_kv_heads: int
    lengths: tuple[int, int]
    widths: tuple[int, int]
    is_dynamic: bool
    dtype: str
    layout: str
    repeat: str
    scales: tuple[tuple[str, str, float], ...]
    softcap: float
    softmax_dtype: str
    masks: tuple[tuple[str, str], ...]
    guard: bool
    also_returned: str
    fault: str


_SCALES = st.tuples(
    st.sampled_from(["q", "k", "scores"]),
    st.sampled_from(["multiply", "divide"]),
    st.sampled_from([0.5, 0.3, 2.0, 1.0]),
)
_MASKS = st.tuples(
    st.sampled_from(["added", "shown", "hidden", "padding", "causal", "last", "window"]),
    st.sampled_from(["-inf", "lowest"]),
)


@st.composite
def forms(draw: Any) -> Form:
    heads, groups = draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]))
    return Form(
        draw(st.integers(1, 3)),
        heads,
        groups,
        (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        (draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        draw(st.booleans()),
        draw(st.sampled_from(["float32", "float32", "float16"])),
        draw(st.sampled_from(["bhsd", "bshd", "folded"])),
        draw(st.sampled_from(["expand", "repeat"])),
        tuple(draw(st.lists(_SCALES, max_size=3))),
        draw(st.sampled_from([0.0, 0.0, 1.5])),
        draw(st.sampled_from(["float32", "float32", "like q"])),
        tuple(draw(st.lists(_MASKS, max_size=2))),
        draw(st.booleans()),
        draw(st.sampled_from(["", "", "k"])),
        draw(st.sampled_from(["", "", "", *FAULTS])),
    )


def shapes(form: Form, s: Any, t: Any) -> dict[str, tuple[tuple, str]]:
    """Inputs by name: shape and dtype, for s queries and t keys."""
    swap = form.layout == "bshd"

    def heads_first(heads: int, length: Any, width: int) -> tuple[tuple, str]:
        shape = (length, heads) if swap else (heads, length)
        return (form.batch, *shape, width), form.dtype

    given = {
        "q": heads_first(form.num_heads, s, form.widths[0]),
        "k": heads_first(form.num_kv_heads, t, form.widths[0]),
        "v": heads_first(form.num_kv_heads, t, form.widths[1]),
    }
    masks = {
        "added": ((1, form.num_heads, s, t), "float32"),
        "shown": ((form.batch, 1, s, t), "bool"),
        "hidden": ((s, t), "bool"),
        "padding": ((form.batch, 1, 1, t), "bool"),
    }
    kinds = {f"mask{i}": kind for i, (kind, _) in enumerate(form.masks)}
    return given | {name: masks[kind] for name, kind in kinds.items() if kind in masks}


def draw_inputs(form: Form, lengths: tuple[int, int]) -> list[Tensor]:
    """Normal numbers; about every third key hidden, whole rows among them."""
    torch.manual_seed(0)
    fills = {f"mask{i}": fill for i, (_, fill) in enumerate(form.masks)}
    tensors = []
    for name, (shape, dtype) in shapes(form, *lengths).items():
        x = torch.rand(shape) < 0.6 if dtype == "bool" else torch.randn(shape)
        if name in fills and dtype != "bool":
            fill = -math.inf if fills[name] == "-inf" else LOWEST
            x = x.masked_fill(torch.rand(shape) < 0.3, fill)
        tensors.append(x.to(getattr(torch, dtype)))
    return tensors


def module(form: Form) -> IRModule:
    return _Builder(form).module()


class _Builder:
    """Emits a form, op by op."""

    def __init__(self, form: Form) -> None:
        self.form, self.bb = form, relax.BlockBuilder()
        s, t = (tirx.Var(n, "int64") for n in "st") if form.is_dynamic else form.lengths
        self.s, self.t = s, t

    def emit(self, name: str, *args: Any, **attrs: Any) -> relax.Var:
        op = getattr(R.nn if name == "softmax" else R, name)
        return self.bb.emit(op(*args, **attrs))

    def const(self, value: float, like: relax.Expr) -> relax.Expr:
        return relax.const(value, str(like.ty.dtype))

    def module(self) -> IRModule:
        inputs = shapes(self.form, self.s, self.t).items()
        given = {n: relax.Var(n, relax.TensorType(*shape)) for n, shape in inputs}
        with self.bb.function("main", list(given.values())):
            with self.bb.dataflow():
                outputs = self.attention(given)
                out = self.bb.emit_output(relax.Tuple(outputs))
            self.bb.emit_func_output(out)
        return self.bb.get()

    def attention(self, given: dict[str, relax.Var]) -> list[relax.Expr]:
        form = self.form
        q, k, v = (self.heads_first(given[name]) for name in "qkv")
        kept = [k] if form.also_returned == "k" else []
        q, k, v = self.scaled("q", q), self.scaled("k", self.repeated(k)), self.repeated(v)
        scores = self.product(q, self.emit("permute_dims", k, [0, 1, 3, 2]))
        scores = self.scaled("scores", scores)
        scores = self.capped(scores)
        if form.softmax_dtype == "float32" and form.dtype != "float32":
            scores = self.emit("astype", scores, "float32")
        scores = self.masked(scores, given)
        weights = self.weights(scores, given)
        return [self.product(weights, v), *kept]

    def heads_first(self, x: relax.Var) -> relax.Var:
        return self.emit("permute_dims", x, [0, 2, 1, 3]) if self.form.layout == "bshd" else x

    def repeated(self, x: relax.Expr) -> relax.Expr:
        form = self.form
        times = form.num_heads // form.num_kv_heads
        if times == 1:
            return x
        if form.repeat == "repeat" and form.fault != "tiled":
            return self.emit("repeat", x, times, 1)
        axis = 1 if form.fault == "tiled" else 2
        batch, groups, length, width = x.ty.shape
        shape = [batch, groups, length, width]
        shape.insert(axis, times)
        x = self.emit("broadcast_to", self.emit("expand_dims", x, axis), shape)
        return self.emit("reshape", x, [batch, form.num_heads, length, width])

    def scaled(self, place: str, x: relax.Expr) -> relax.Expr:
        for where, op, factor in self.form.scales:
            x = self.emit(op, x, self.const(factor, x)) if where == place else x
        return x

    def capped(self, scores: relax.Expr) -> relax.Expr:
        if not self.form.softcap:
            return scores
        cap = self.const(self.form.softcap, scores)
        return self.emit("multiply", self.emit("tanh", self.emit("divide", scores, cap)), cap)

    def product(self, a: relax.Expr, b: relax.Expr) -> relax.Expr:
        if self.form.layout != "folded":
            return self.emit("matmul", a, b)
        batch, heads, rows, _ = a.ty.shape
        columns = b.ty.shape[3]
        a, b = (self.emit("reshape", x, [batch * heads, *list(x.ty.shape)[2:]]) for x in (a, b))
        return self.emit("reshape", self.emit("matmul", a, b), [batch, heads, rows, columns])

    def masked(self, scores: relax.Expr, given: dict[str, relax.Var]) -> relax.Expr:
        for i, (kind, fill) in enumerate(self.form.masks):
            mask = given.get(f"mask{i}")
            if kind == "added":
                name = "multiply" if self.form.fault == "mask-multiplied" else "add"
                mask = self.emit("astype", mask, str(scores.ty.dtype))
                scores = self.emit(name, scores, mask)
                continue
            value = self.const(self.fill(fill, scores), scores)
            shown = self.band(kind) if mask is None else mask
            pair = (value, scores) if kind == "hidden" else (scores, value)
            scores = self.emit("where", shown, *pair)
        return scores

    def fill(self, fill: str, scores: relax.Expr) -> float:
        if self.form.fault == "other-fill":
            return -1.0
        info = torch.finfo(getattr(torch, str(scores.ty.dtype)))
        return -math.inf if fill == "-inf" else float(info.min)

    def band(self, kind: str) -> relax.Expr:
        i = self.emit("expand_dims", self.emit("arange", 0, self.s, 1, "int64"), 1)
        j = self.emit("arange", 0, self.t, 1, "int64")
        if kind == "last":
            first = self.t - self.s
            i = self.emit("add", i, self.emit("arange", first, first + 1, 1, "int64"))
        causal = self.emit("less_equal", j, i)
        if kind != "window":
            return causal
        oldest = self.emit("subtract", i, relax.const(2, "int64"))
        return self.emit("logical_and", causal, self.emit("greater", j, oldest))

    def weights(self, scores: relax.Expr, given: dict[str, relax.Var]) -> relax.Expr:
        fault = self.form.fault
        if fault == "scale-last":
            scores = self.emit("multiply", scores, self.const(0.5, scores))
        weights = self.emit("softmax", scores, axis=-2 if fault == "axis" else -1)
        if self.form.guard:
            is_nan = self.emit("isnan", weights)
            weights = self.emit("where", is_nan, self.const(0.0, weights), weights)
        if fault == "gate":
            weights = self.emit("multiply", weights, self.emit("tanh", weights))
        if str(weights.ty.dtype) != self.form.dtype:
            weights = self.emit("astype", weights, self.form.dtype)
        return weights

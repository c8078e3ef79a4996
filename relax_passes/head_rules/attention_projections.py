"""The weights around each `R.sits.attention`: which rows of which of them make which head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst, Op

from ..op.attention import NAME
from ..packed_weights.weight_sites import MATMUL, bindings_of
from .selection import VIEW, NotPerHead, Selection, op_name
from .selector import HeadSelector

ATTENTION = Op.get(NAME)
_ON_THE_WAY_OUT = [Op.get(f"relax.{name}") for name in ("permute_dims", "reshape", "astype")]


@dataclass(frozen=True)
class Leaf:
    """Entries of a weight or a bias, and the head that each belongs to."""

    source: relax.Expr
    selection: Selection

    def of_head(self, array: np.ndarray, head: int) -> np.ndarray:
        """(entries of the head, everything else), of the whole array of `source`."""
        selection = self.selection
        rows = array.take(selection.index[selection.heads == head], selection.axis)
        rows = np.moveaxis(rows, selection.axis, 0)
        return rows.reshape(len(rows), -1)


@dataclass
class HeadTrace:
    """How the heads of q, k or v, or the input channels of the output projection, are made."""

    leaves: list[Leaf] = field(default_factory=list)
    kind: int = VIEW
    inside: set[relax.Var] = field(default_factory=set)
    products: list[relax.Var] = field(default_factory=list)

    def leaf(self, source: relax.Expr, selection: Selection) -> relax.Expr:
        self.leaves.append(Leaf(source, selection))
        return source

    def keep(self, expr: relax.Expr) -> relax.Expr:
        return expr

    def emit(self, value: relax.Expr, like: relax.Var) -> relax.Expr:
        self.inside.add(like)
        if isinstance(value, relax.Call) and value.op == MATMUL:
            self.products.append(like)
        return like

    def passes(self, kind: int, through: relax.Var | None = None) -> None:
        self.kind = max(self.kind, kind)
        self.inside |= set() if through is None else {through}


@dataclass(frozen=True)
class AttentionWeights:
    """One attention whose heads are rows of weights.

    Attributes
    ----------
    variable, call : the attention
    q, k, v : HeadTrace
        Of query heads 0 … H-1 (q), of key/value heads 0 … G-1 (k, v).
    product : relax.Var
        The matrix product that reads the heads, `joined` its left operand, `order` the head of
        each of its channels, which are in order of D_v within a head.
    o : HeadTrace
        Of the channels of the weight of `product`.
    """

    function: str
    variable: relax.Var
    call: relax.Call
    q: HeadTrace
    k: HeadTrace
    v: HeadTrace
    product: relax.Var
    joined: relax.Expr
    order: np.ndarray
    o: HeadTrace

    @property
    def traces(self) -> dict[str, HeadTrace]:
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}

    @property
    def num_heads(self) -> int:
        return int(self.call.args[0].ty.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.call.args[1].ty.shape[1])

    @property
    def value_dim(self) -> int:
        return int(self.call.args[2].ty.shape[3])


@dataclass(frozen=True)
class FunctionUses:
    """What the variables of one function are bound to, and which variables read each."""

    bound: Mapping[relax.Var, relax.Expr]
    readers: Mapping[relax.Expr, list[relax.Var | None]]

    @staticmethod
    def of(func: relax.Function) -> FunctionUses:
        """A reader None stands for the function's result."""
        bound: dict[relax.Var, relax.Expr] = {}
        readers: dict[relax.Expr, list[relax.Var | None]] = {}
        for binding in bindings_of(func.body):
            if isinstance(binding, relax.VarBinding):
                bound[binding.var] = binding.value
            for variable in operands(binding.value):
                readers.setdefault(variable, []).append(binding.var)
        for variable in operands(func.body.body):
            readers.setdefault(variable, []).append(None)
        return FunctionUses(bound, readers)


def operands(value: relax.Expr) -> set[relax.Expr]:
    """Variables and constants in an expression; of a branch, those from outside."""
    if isinstance(value, relax.If):
        return set(relax.analysis.free_vars(value))
    found: set[relax.Expr] = set()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var | GenericConst):
            found.add(expr)

    relax.analysis.post_order_visit(value, visit)
    return found


def find_attention_weights(
    name: str, func: relax.Function, weights: set[relax.Var]
) -> Iterator[tuple[relax.Var, AttentionWeights | str]]:
    """Every attention in `func`, with its weights, or why they can't be told apart by head."""
    uses = FunctionUses.of(func)
    for variable, value in uses.bound.items():
        if isinstance(value, relax.Call) and value.op == ATTENTION:
            try:
                yield variable, _read(name, variable, value, uses, weights)
            except NotPerHead as reason:
                yield variable, str(reason)


def _read(
    name: str, variable: relax.Var, call: relax.Call, uses: FunctionUses, weights: set[relax.Var]
) -> AttentionWeights:
    product, joined = _product_of(variable, uses)
    order = _head_order(variable, call, joined, uses)
    q, k, v = (_trace(n, uses, arg, weights) for n, arg in zip("qkv", call.args, strict=False))
    weight = uses.bound[product].args[1]
    channels = Selection.of(weight.ty.ndim - 2, np.repeat(order, int(call.args[2].ty.shape[3])))
    channels = Selection(channels.axis, np.arange(len(channels.index)), channels.heads)
    o = _walk("the output projection", uses, weight, channels, weights)
    if not _is_matrix(o, len(channels.index)):
        raise NotPerHead("the weight of the output projection is computed, not one matrix")
    return AttentionWeights(name, variable, call, q, k, v, product, joined, order, o)


def _is_matrix(trace: HeadTrace, channels: int) -> bool:
    """One matrix, transposed and cast at most."""
    if len(trace.leaves) != 1 or trace.kind != VIEW:
        return False
    leaf = trace.leaves[0]
    if leaf.source.ty.ndim != 2:
        return False
    whole = int(leaf.source.ty.shape[leaf.selection.axis])
    return whole == channels and np.array_equal(leaf.selection.index, np.arange(whole))


def _product_of(variable: relax.Var, uses: FunctionUses) -> tuple[relax.Var, relax.Expr]:
    """The matmul that reads the heads, through reshapes and casts."""
    at = variable
    while True:
        readers = uses.readers.get(at, [])
        if len(readers) != 1 or readers[0] is None:
            found = f"{len(readers)} places" if None not in readers else "the function's result"
            raise NotPerHead(f"the result of the attention, `{at.name}`, is read by {found}")
        value: Any = uses.bound.get(readers[0])
        if isinstance(value, relax.Call) and value.op == MATMUL and value.args[0] == at:
            if value.args[1].ty.ndim != 2:
                raise NotPerHead("the output projection is no matrix")
            return readers[0], at
        is_way = isinstance(value, relax.Call) and value.op in _ON_THE_WAY_OUT
        if not (is_way or isinstance(value, relax.Var)):
            found = f"`{readers[0].name}`, {op_name(value)}"
            raise NotPerHead(f"{found}, is between the attention and its output projection")
        at = readers[0]


def _head_order(
    variable: relax.Var, call: relax.Call, joined: relax.Expr, uses: FunctionUses
) -> np.ndarray:
    """The head of each block of channels of the output projection's input."""
    trace = HeadTrace()
    selector = HeadSelector(uses.bound, trace, frozenset([variable]))
    width = joined.ty.shape[joined.ty.ndim - 1]
    if not isinstance(width, tirx.IntImm):
        raise NotPerHead("the output projection has a symbolic number of channels")
    size = int(call.args[2].ty.shape[3])
    selector.select(joined, Selection.blocks(joined.ty.ndim - 1, int(width), size))
    [leaf] = trace.leaves
    if int(call.ty.shape[1]) == 1 and leaf.selection.axis == 3:
        leaf = Leaf(leaf.source, Selection.of(1, np.zeros(1, int)))
    if leaf.selection.axis != 1 or len(leaf.selection.index) != int(call.ty.shape[1]):
        raise NotPerHead("the output projection does not join the heads one after the other")
    return leaf.selection.index


def _trace(name: str, uses: FunctionUses, arg: relax.Expr, weights: set[relax.Var]) -> HeadTrace:
    return _walk(name, uses, arg, Selection.of(1, np.arange(int(arg.ty.shape[1]))), weights)


def _walk(
    name: str, uses: FunctionUses, arg: relax.Expr, selection: Selection, weights: set[relax.Var]
) -> HeadTrace:
    trace = HeadTrace()
    try:
        HeadSelector(uses.bound, trace).select(arg, selection)
    except NotPerHead as reason:
        raise NotPerHead(f"{name}: {reason}") from reason
    for leaf in trace.leaves:
        if not (isinstance(leaf.source, GenericConst) or leaf.source in weights):
            shown = getattr(leaf.source, "name", leaf.source)
            raise NotPerHead(f"{name} is made of `{shown}`, which is no weight")
    return trace

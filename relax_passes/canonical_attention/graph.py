"""Definitions and readers of a function's variables, and why a block is no attention of ours.
Shared by the recognition of attention."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from .._adjoint import bodies_of, used_vars
from .._values import Values
from .remedies import REMEDIES

FLOATS = ("float16", "bfloat16", "float32", "float64")


class NearMiss(Exception):
    """A block that has the parts of attention but is none that `relax.sits.attention` can say.

    Attributes
    ----------
    code : str
        Kebab-case name of the condition that failed.
    message : str
        What was found, with values.
    binding : str
        The variable where it was found.
    help : str
        What to write instead.
    """

    def __init__(self, code: str, message: str, where: relax.Expr) -> None:
        self.code, self.message, self.help = code, message, REMEDIES[code]
        self.binding = where.name if isinstance(where, relax.Var) else ""
        super().__init__(message)


class Graph(Values):
    """`Values` of a function, and which bindings read each variable."""

    def __init__(self, func: relax.Function) -> None:
        super().__init__(func)
        self.func = func
        self.bindings: list[relax.Binding] = []
        self.readers: dict[relax.Var, list[relax.Binding]] = {}
        self.results: set[relax.Var] = set()
        for body in bodies_of(func.body):
            self.results.update(relax.analysis.free_vars(body.body))
            for block in body.blocks:
                self.bindings += block.bindings
        for binding in self.bindings:
            value = binding.value
            for var in set(used_vars(value.cond if isinstance(value, relax.If) else value)):
                self.readers.setdefault(var, []).append(binding)
        self.binding_of = {binding.var: binding for binding in self.bindings}

    @functools.cached_property
    def activations(self) -> set[relax.Var]:
        """What is computed from inputs, not from weights alone.

        Inputs are the arguments before ``num_input``. Without it float matrices may be weights,
        until they are multiplied.
        """
        count = (self.func.attrs or {}).get("num_input")
        inputs = self.func.params if count is None else self.func.params[: int(count)]
        found = {x for x in inputs if count is not None or not _is_matrix(x)}
        for var, value in ((b.var, b.value) for b in self.bindings):
            is_product = count is None and self.call(var)[0] in ("matmul", "einsum")
            if is_product or not found.isdisjoint(used_vars(value)):
                found.add(var)
        return found

    def words(self, var: relax.Expr) -> str:
        """What makes `var`."""
        name, value = self.call(var)[0], self.of(var)
        if name:
            return f"R.{name}"
        if isinstance(self.binding_of.get(value), relax.MatchCast):
            return "R.match_cast"
        if isinstance(value, relax.TupleGetItem):
            return f"a field of {self.words(value.tuple_value)}"
        if isinstance(value, relax.Call):
            return f"a call of `{getattr(value.op, 'name_hint', value.op)}`"
        kinds = {relax.Tuple: "a tuple", relax.If: "a branch", relax.Var: "an argument"}
        return kinds.get(type(value), "a constant")

    def is_copy(self, var: relax.Var) -> bool:
        return isinstance(self.bound.get(var), relax.Var)

    def fill(self, expr: relax.Expr) -> float | None:
        """The number that all elements of `expr` are, also of full_like and scalar arithmetic."""
        name, call = self.call(expr)
        if name in ("zeros_like", "ones_like"):
            return float(name == "ones_like")
        if name == "full_like":
            return self.fill(call.args[1])
        if name in _ARITHMETIC and expr.ty.ndim == 0:
            numbers = [self.fill(arg) for arg in call.args]
            known = [number for number in numbers if number is not None]
            return _computed(name, known) if len(known) == len(numbers) else None
        return self.number(expr)


def _is_matrix(x: relax.Var) -> bool:
    return isinstance(x.ty, relax.TensorType) and x.ty.ndim <= 2 and dtype_of(x) in FLOATS


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "negative": operator.neg,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "power": operator.pow,
}


def _computed(name: str, numbers: Sequence[float]) -> float | None:
    try:
        return float(_ARITHMETIC[name](*numbers))
    except (ArithmeticError, ValueError, TypeError):
        return None


def shape_of(expr: relax.Expr) -> list[tvm.ir.Expr]:
    """The dimensions of a tensor.

    Raises
    ------
    NearMiss
        If they are unknown.
    """
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        raise NearMiss("shape-unknown", f"{expr} is {expr.ty}", expr)
    return list(shape)


def dtype_of(expr: relax.Expr) -> str:
    return str(expr.ty.dtype)


def is_wider(dtype: str, than: str) -> bool:
    """Whether every number of the float type `than` is one of `dtype`, which differs."""
    wider = {"float16": ("float32", "float64"), "bfloat16": ("float32", "float64")}
    return dtype in {**wider, "float32": ("float64",)}.get(than, ())


def widest(*dtypes: str) -> str:
    """The narrowest float type that holds all numbers of `dtypes`."""
    result = dtypes[0]
    for dtype in dtypes[1:]:
        if is_wider(dtype, result):
            result = dtype
        elif dtype != result and not is_wider(result, dtype):
            result = "float32"  # of float16 and bfloat16
    return result

"""Random Relax modules, each with inputs, weights, and NumPy that computes the same in float64.

A module has one or two public functions that share weights, and a private one. `random_ops` holds
what they are made of. A seed gives the same module always; with fewer operations, the beginning
of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from small_modules import restored
from tvm import IRModule, relax, tirx

from sits_tvm import QuantSpec

FLOATS = ("float32", "float16", "bfloat16")
EXTENTS = (1, 2, 3, 5, 8, 32, 33, 64, 0)
TOLERANCE = {"float32": 2e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""Of results, to the largest of them, by the coarsest float type in the function."""


def to_dtype(array: Any, dtype: str) -> np.ndarray:
    return np.asarray(array).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def rounded(array: Any, dtype: str) -> np.ndarray:
    """As a tensor of `dtype` holds it; floats as float64, to compute with."""
    stored = to_dtype(array, dtype)
    return stored.astype("float64") if dtype in FLOATS else stored


@dataclass(eq=False)
class Value:
    """A Relax expression, and what computes the same from the weights."""

    expr: relax.Expr
    compute: Callable[[Mapping[str, np.ndarray], dict], np.ndarray]
    array: np.ndarray

    @property
    def dtype(self) -> str:
        return str(self.expr.ty.dtype)

    @property
    def dims(self) -> list[int | None]:
        """Extents; None where they are symbolic."""
        return [int(d) if isinstance(d, tirx.IntImm) else None for d in self.expr.ty.shape]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def at(self, weights: Mapping[str, np.ndarray], known: dict) -> np.ndarray:
        if self not in known:
            known[self] = self.compute(weights, known)
        return known[self]


@dataclass
class Function:
    """A public function under construction or made: inputs, results, what it can use."""

    name: str
    inputs: list[tuple[relax.Var, np.ndarray]] = field(default_factory=list)
    weights: dict[str, relax.Var] = field(default_factory=dict)
    pool: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    dims: dict[str, tirx.Var] = field(default_factory=dict)
    in_dataflow: bool = True

    def reference(self, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        known: dict = {}
        return [value.at(weights, known) for value in self.results]

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE.get(value.dtype, 0) for value in self.pool)


class Draft:
    """What operations are given: random choices, the builder, the function at work."""

    def __init__(self, seed: int) -> None:
        self.random, self.bb = random.Random(seed), relax.BlockBuilder()
        self.rng = np.random.default_rng(seed)
        self.weights: dict[str, np.ndarray] = {}
        self.layouts: dict[str, str] = {}
        self.sizes = {name: self.one_of((3, 1, 17, 0)) for name in ("n", "m")}
        self.function = Function("")
        self.helper: tuple[relax.GlobalVar, Value] | None = None

    def one_of(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def input(self, dims: tuple[int | str, ...], dtype: str, high: int = 0) -> Value:
        """A new input; integers below `high`, or small ones. A dim that is a name is symbolic."""
        shape = tuple(self.sizes.get(d, d) for d in dims)
        if dtype == "bool":
            array = self.rng.random(shape) < 0.5
        elif dtype in FLOATS:
            array = self.rng.standard_normal(shape)
        else:
            low = 0 if high else -9
            array = self.rng.integers(low, high or 9, shape)
        type_ = relax.TensorType([self.dim(d) for d in dims], dtype)
        var = relax.Var(f"x{len(self.function.inputs)}", type_)
        self.function.inputs.append((var, to_dtype(array, dtype)))
        held = rounded(array, dtype)
        return self.add(Value(var, lambda *_: held, held))

    def dim(self, d: int | str) -> Any:
        if isinstance(d, int):
            return d
        return self.function.dims.setdefault(d, tirx.Var(d, "int64"))

    def weight(self, shape: tuple[int, int], dtype: str, layout: str) -> Value:
        """A matrix (N, K) "nk" or "faked", or (K, N) "kn"; one that there is, if it is drawn."""
        same = [
            name
            for name, array in self.weights.items()
            if (array.shape, str(array.dtype), self.layouts[name]) == (shape, dtype, layout)
            and layout != "faked"
        ]
        name = self.one_of([*same, f"w{len(self.weights)}"])
        if name not in self.weights:
            depth = max(1, shape[layout != "kn"])
            array = self.rng.standard_normal(shape) / np.sqrt(depth)
            self.weights[name], self.layouts[name] = to_dtype(array, dtype), layout
        return self._argument(name)

    def vector(self, length: int, dtype: str) -> Value:
        name = f"v{len(self.weights)}"
        self.weights[name] = to_dtype(self.rng.standard_normal(length), dtype)
        self.layouts[name] = "vector"
        return self._argument(name)

    def _argument(self, name: str) -> Value:
        array = self.weights[name]
        type_ = relax.TensorType(array.shape, str(array.dtype))
        var = self.function.weights.setdefault(name, relax.Var(name, type_))
        return Value(var, lambda weights, _: weights[name].astype("float64"), array)

    def emit(self, expr: relax.Expr, compute: Callable[..., Any], *operands: Value) -> Value:
        """Bind `expr`; `compute` takes the arrays of `operands`."""
        var = self.bb.emit(expr)
        return self.bound(var, compute, *operands)

    def bound(self, var: relax.Var, compute: Callable[..., Any], *operands: Value) -> Value:
        dtype = str(var.ty.dtype)

        def at(weights: Mapping[str, np.ndarray], known: dict) -> np.ndarray:
            return rounded(compute(*(v.at(weights, known) for v in operands)), dtype)

        value = Value(var, at, at(self.weights, {}))
        if isinstance(var.ty.shape, relax.ShapeExpr):
            assert value.array.ndim == len(value.dims)
            self.add(value)
        return value

    def add(self, value: Value) -> Value:
        self.function.pool.append(value)
        return value


@dataclass
class RandomModule:
    mod: IRModule
    functions: list[Function]
    weights: dict[str, np.ndarray]
    layouts: dict[str, str]

    def quantized(self, names: set[str], spec: QuantSpec) -> dict[str, np.ndarray]:
        """The weights, those of `names` as INT4 holds them."""
        out = dict(self.weights)
        for name in names:
            if self.layouts[name] == "faked":  # the reference quantizes it
                continue
            array = self.weights[name].astype("float32")
            stored = restored(array if self.layouts[name] == "nk" else array.T, spec)
            stored = stored if self.layouts[name] == "nk" else stored.T
            out[name] = to_dtype(stored, str(self.weights[name].dtype))
        return out


def random_module(seed: int, most: int) -> RandomModule:
    """One whose functions make up to `most` operations each."""
    import random_ops

    draft = Draft(seed)
    with np.errstate(all="ignore"):
        random_ops.make_helper(draft)
        names = ["main", "other"][: draft.one_of((1, 2))]
        functions = [_function(draft, name, most) for name in names]
    return RandomModule(draft.bb.get(), functions, draft.weights, draft.layouts)


def _function(draft: Draft, name: str, most: int) -> Function:
    import random_ops

    draft.function = function = Function(name, in_dataflow=draft.one_of((True, False)))
    with draft.bb.function(name):
        if function.in_dataflow:
            with draft.bb.dataflow():
                _body(draft, random_ops.OPS, most)
                outputs = [draft.bb.emit_output(v.expr) for v in function.results]
        else:
            _body(draft, random_ops.OPS, most)
            outputs = [v.expr for v in function.results]
        result = outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)
        arguments = [var for var, _ in function.inputs] + [*function.weights.values()]
        draft.bb.emit_func_output(result, arguments)
    gvar = draft.bb.get().get_global_var(name)
    made = draft.bb.get()[name].with_attr("num_input", len(function.inputs))
    draft.bb.update_func(gvar, made)
    return function


def _body(draft: Draft, ops: Any, most: int) -> None:
    function = draft.function
    dims = tuple(draft.one_of(("n", *EXTENTS)) for _ in range(draft.one_of((2, 3, 1))))
    draft.input(dims, draft.one_of(FLOATS))
    for _ in range(most):
        draft.one_of(ops)(draft, draft.one_of(function.pool))
    count = draft.one_of((1, 2, 3))
    function.results = [*dict.fromkeys([*function.pool[-1:], *function.pool[:-1][-count:]])]

"""Compare an adjoint with the one that `Gradient` makes, but for what quantization passes back."""

from __future__ import annotations

from collections.abc import Iterator

import tvm_ffi
from tvm import relax

from relax_passes._adjoint import bindings_of
from relax_passes._quantize_values import Values

_GRADIENT = "sits.fake_quantize_grad"
# Through these alone, a partial of quantization reaches the scale or tensor it belongs to.
_CARRIES = (
    "add",
    "astype",
    "broadcast_to",
    "collapse_sum_like",
    "collapse_sum_to",
    "expand_dims",
    "permute_dims",
    "reshape",
    "squeeze",
    "sum",
)
_ZEROS = ("zeros", "zeros_like")


def first_difference(given: relax.Function, made: relax.Function, sites: set[str]) -> str | None:
    """The variable of `given` where the two differ by more than what quantization passes back."""
    return _Comparison(given, made, sites).run()


class _Comparison:
    def __init__(self, given: relax.Function, made: relax.Function, sites: set[str]) -> None:
        self.given, self.made, self.sites = Values(given), Values(made), sites
        self.named = {b.var.name: b.var for b in bindings_of(given)}
        self.params = dict(zip(given.params, made.params, strict=True))
        self.after = _depending_on_partials(self.made, made)
        self.todo: list[tuple[relax.Expr, relax.Expr]] = [(given.body.body, made.body.body)]
        self.done: set[tuple[relax.Expr, relax.Expr]] = set()

    def run(self) -> str | None:
        while self.todo:
            a, b = self.todo.pop()
            name = a.name if isinstance(a, relax.Var) else str(a)
            a_value, b_value = self.given.of(a), self.made.of(b)
            key = (a_value, b_value)
            if key in self.done:
                continue
            self.done.add(key)
            if not self._equal(a, b, a_value, b_value):
                return name
        return None

    def _equal(self, a: relax.Expr, b: relax.Expr, given: relax.Expr, made: relax.Expr) -> bool:
        """Whether two values are alike, their operands put off."""
        if isinstance(made, relax.Var):
            return isinstance(given, relax.Var) and self.params.get(given) == made
        op, _ = self.made.call(made)
        if op == "sits.fake_quantize" and isinstance(b, relax.Var) and b.name in self.sites:
            return isinstance(a, relax.Var) and a.name == b.name
        gradients = list(self._partials(made))
        if gradients:
            return all(self._has_gradient(given, call) for call in gradients)
        if self.given.call(given)[0] in _ZEROS and made in self.after:
            return True
        return self._same_op(given, made)

    def _same_op(self, given: relax.Expr, made: relax.Expr) -> bool:
        if type(given) is not type(made):
            return False
        if isinstance(made, relax.Call):
            if not (
                tvm_ffi.structural_equal(given.op, made.op)
                and tvm_ffi.structural_equal(given.attrs, made.attrs)
                and len(given.args) == len(made.args)
            ):
                return False
            self.todo += zip(given.args, made.args, strict=True)
            return True
        if isinstance(made, relax.Tuple):
            self.todo += zip(given.fields, made.fields, strict=False)
            return len(given.fields) == len(made.fields)
        if isinstance(made, relax.TupleGetItem):
            self.todo.append((given.tuple_value, made.tuple_value))
            return given.index == made.index
        return bool(tvm_ffi.structural_equal(given, made))

    def _partials(self, made: relax.Expr, depth: int = 8) -> Iterator[relax.Call]:
        """The gradient calls of quantization that `made` carries on, and nothing but them."""
        if isinstance(made, relax.TupleGetItem):
            op, call = self.made.call(made.tuple_value)
            if op == _GRADIENT:
                yield call
        op, call = self.made.call(made)
        if op == _GRADIENT:
            yield call
        if op in _CARRIES and depth:
            for arg in call.args:
                yield from self._partials(self.made.of(arg), depth - 1)

    def _has_gradient(self, given: relax.Expr, partial: relax.Call) -> bool:
        """The upstream gradient of a site must be alike too, unless nothing of it is used."""
        upstream = partial.args[0]
        if isinstance(upstream, relax.Var) and upstream.name in self.named:
            self.todo.append((self.named[upstream.name], upstream))
            return True
        return self.given.call(given)[0] in _ZEROS


def _depending_on_partials(values: Values, made: relax.Function) -> set[relax.Expr]:
    """The values that are computed from partials of quantization."""
    variables: set[relax.Var] = set()
    found: set[relax.Expr] = set()
    for binding in bindings_of(made):
        is_partial = values.call(binding.value)[0] == _GRADIENT
        if is_partial or variables & set(relax.analysis.free_vars(binding.value)):
            variables.add(binding.var)
            found.add(binding.value)
    return found

"""The parts of a function that a rewrite changed, each as two functions of the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx

from relax_passes._adjoint import bodies_of, used_vars

Bindings = dict[relax.Var, relax.Expr]


@dataclass(frozen=True)
class Region:
    """What computed `binding`, and what computes it now: ``main`` of two modules.

    Each is one dataflow block. Both take a shape of `dims`, the symbolic dimensions, and then
    `inputs`.
    """

    binding: str
    dims: tuple[tirx.Var, ...]
    inputs: tuple[relax.Var, ...]
    before: IRModule
    after: IRModule

    @property
    def dtype(self) -> str:
        return str(self.after["main"].ret_ty.dtype)


def changed_regions(before: relax.Function, after: relax.Function) -> list[Region]:
    """One region for each value that `after`, a mutation of `before`, computes in another way.

    A mutator keeps the variables of what it does not touch: there a region begins, taking them for
    arguments, and there it ends.
    """
    old, new = _bindings(before), _bindings(after)
    kept = {var for var in new if var in old and _is_same(old[var], new[var])}
    kept |= set(before.params) & set(after.params)
    return [_region(old, new, kept, *ends) for ends in _ends(before, after, old, new, kept)]


def _bindings(func: relax.Function) -> Bindings:
    blocks = (block for body in bodies_of(func.body) for block in body.blocks)
    bindings = (b for block in blocks for b in block.bindings)
    return {b.var: b.value for b in bindings if isinstance(b, relax.VarBinding)}


def _read(value: relax.Expr) -> Iterator[relax.Var]:
    """The tensors that a value reads; not the symbolic dimensions."""
    return (var for var in used_vars(value) if not isinstance(var.ty, tvm.ir.PrimType))


def _read_here(value: relax.Expr) -> Iterator[relax.Var]:
    """The same outside of branches, whose bindings are readers themselves."""
    return _read(value.cond if isinstance(value, relax.If) else value)


def _is_same(old: relax.Expr, new: relax.Expr) -> bool:
    """Whether two values are the same but for the variables that they read."""
    if not (isinstance(old, relax.Call) and isinstance(new, relax.Call)):
        return _is_same_part(old, new)
    if not old.op.same_as(new.op) or len(old.args) != len(new.args):
        return False
    pairs = zip([old.attrs, *old.args], [new.attrs, *new.args], strict=True)
    return all(_is_same_part(a, b) for a, b in pairs)


def _is_same_part(old: object, new: object) -> bool:
    if isinstance(old, relax.If) and isinstance(new, relax.If):
        return True  # what is in the branches is compared by itself
    if isinstance(old, relax.Var):
        return isinstance(new, relax.Var) and tvm_ffi.structural_equal(old.ty, new.ty)
    if isinstance(old, relax.Tuple) and isinstance(new, relax.Tuple):
        pairs = zip(old.fields, new.fields, strict=False)
        return len(old) == len(new) and all(_is_same_part(a, b) for a, b in pairs)
    if isinstance(old, relax.TupleGetItem) and isinstance(new, relax.TupleGetItem):
        return old.index == new.index
    return tvm_ffi.structural_equal(old, new, map_free_vars=False)


def _ends(
    before: relax.Function,
    after: relax.Function,
    old: Bindings,
    new: Bindings,
    kept: Set[relax.Var],
) -> list[tuple[relax.Var, relax.Var]]:
    """What the same reader, or the caller, reads in the one and in the other."""
    readers = [(old[var], new[var]) for var in new if var in kept and var in old]
    found: dict[relax.Var, relax.Var] = {}
    bodies = zip(bodies_of(before.body), bodies_of(after.body), strict=False)
    for was, is_ in [*readers, *((a.body, b.body) for a, b in bodies)]:
        for x, y in zip(_read_here(was), _read_here(is_), strict=False):
            if y in new and (not x.same_as(y) or y not in kept):
                found.setdefault(y, x)
    return [(x, y) for y, x in found.items()]


def _region(
    old: Bindings, new: Bindings, kept: Set[relax.Var], x: relax.Var, y: relax.Var
) -> Region:
    """From `x` and `y` back to kept variables, further where only one of them reads something."""
    opened = {y}
    while True:
        now = _slice(new, y, kept - opened)
        ends = _leaves(new, now)
        was = _slice(old, x, ends - {x})
        read = _leaves(old, was)
        only_before = (read or {x}) - ends
        tied = {v for v in ends if v in old and (v not in read or only_before & _ancestors(old, v))}
        if not tied:
            break
        opened |= tied
    inputs = sorted(ends | only_before, key=lambda var: var.name)
    dims = _dims(inputs)
    modules = (_module(old, was, x, inputs, dims), _module(new, now, y, inputs, dims))
    return Region(x.name, dims, tuple(inputs), *modules)


def _slice(bindings: Bindings, end: relax.Var, inputs: Set[relax.Var]) -> list[relax.Var]:
    """The bound variables that `end` needs, in order, without inputs and what is before them."""
    needed, todo = set(), [end]
    while todo:
        var = todo.pop()
        if var in needed or var in inputs or var not in bindings:
            continue
        needed.add(var)
        todo.extend(_read(bindings[var]))
    return [var for var in bindings if var in needed]


def _leaves(bindings: Bindings, inside: list[relax.Var]) -> set[relax.Var]:
    read = {read for var in inside for read in _read(bindings[var])}
    return read - set(inside)


def _ancestors(bindings: Bindings, var: relax.Var) -> set[relax.Var]:
    inside = _slice(bindings, var, set())
    return {*inside, *_leaves(bindings, inside)}


def _dims(inputs: list[relax.Var]) -> tuple[tirx.Var, ...]:
    symbols = (relax.analysis.tir_vars_in_type(var.ty) for var in inputs)
    return tuple(dict.fromkeys(dim for found in symbols for dim in found))


def _module(
    bindings: Bindings,
    inside: list[relax.Var],
    end: relax.Var,
    inputs: list[relax.Var],
    dims: tuple[tirx.Var, ...],
) -> IRModule:
    shape = relax.Var("dims", relax.ShapeType(list(dims)))
    arguments = [relax.Var(var.name, var.ty) for var in inputs]
    given = [relax.VarBinding(*pair) for pair in zip(inputs, arguments, strict=True)]
    result = relax.Var("result", end.ty)
    block = [*given, *(relax.VarBinding(var, bindings[var]) for var in inside if var != end)]
    block.append(relax.VarBinding(result, bindings.get(end, end)))
    has_branches = any(isinstance(binding.value, relax.If) for binding in block)
    kind = relax.BindingBlock if has_branches else relax.DataflowBlock
    body = relax.SeqExpr([kind(block)], result)
    func = relax.Function([shape, *arguments], body, end.ty).with_attr("global_symbol", "main")
    mod = relax.transform.Normalize()(IRModule({"main": func}))
    return relax.transform.CanonicalizeBindings()(mod)

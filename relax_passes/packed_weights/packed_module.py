"""Put functions with packed arguments, and their transform functions, into a module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tvm import relax
from tvm.ir import GlobalVar, IRModule, Op

from sits_tvm.diagnostics import Diagnostic, emit

from .packed_function import (
    SOURCE_NAMES,
    TRANSFORM_SUFFIX,
    PackedCall,
    Packer,
    Packing,
    with_packed_arguments,
)

_READERS = {"relax.sits.int4_matmul", "relax.sits.int4_take"}
FUNCTION_IS_CALLED = (
    "function-is-called",
    "another function calls this one; make it private: it is inlined",
)


def pack_function(
    out: IRModule, gvar: GlobalVar, packings: Sequence[tuple[PackedCall, Packing]]
) -> None:
    """Replace a function of `out`; emits an error for each name that is taken."""
    name = gvar.name_hint + TRANSFORM_SUFFIX
    func = out[gvar]
    out[gvar], transform = with_packed_arguments(func, Packer(out, packings))
    if transform is None:
        return
    earlier = _transform_of(out, name)
    _check_names(out, name, out[gvar], earlier is not None)
    out[name] = transform if earlier is None else compose(earlier, transform)


def reads_packed_weights(mod: IRModule) -> bool:
    """Whether a function has INT4 weights already."""
    return not _READERS.isdisjoint(op.name for op in _called(mod) if isinstance(op, Op))


def _called(mod: IRModule) -> list[relax.Expr]:
    """What the Relax functions of a module call."""
    ops: list[relax.Expr] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            ops.append(expr.op)

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return ops


def compose(first: relax.Function, second: relax.Function) -> relax.Function:
    """The transform function that runs `second` on what `first` returns."""
    bb = relax.BlockBuilder()
    name = str(first.attrs["global_symbol"])
    argument = relax.Var("params", first.params[0].ty)
    with bb.function(name, [argument]):
        with bb.dataflow():
            fields = _emit_all(bb, first, argument)
            result = bb.emit_output(relax.Tuple(_emit_all(bb, second, relax.Tuple(fields))))
        bb.emit_func_output(result)
    return bb.get()[name].with_attr(SOURCE_NAMES, first.attrs[SOURCE_NAMES])


def _emit_all(
    bb: relax.BlockBuilder, func: relax.Function, argument: relax.Expr
) -> list[relax.Expr]:
    """Emit the bindings of a transform function on `argument`; the fields that it returns."""
    values: dict[relax.Expr, relax.Expr] = {func.params[0]: argument}
    for binding in func.body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Tuple):
            return [values.get(field, field) for field in value.fields]
        if isinstance(value, relax.Call):
            args = [values.get(arg, arg) for arg in value.args]
            made = bb.emit(relax.Call(value.op, args, value.attrs))
        else:
            whole = values[value.tuple_value]
            if isinstance(whole, relax.Tuple):
                made = whole.fields[value.index]
            else:
                made = bb.emit(relax.TupleGetItem(whole, value.index), binding.var.name)
        values[binding.var] = made
    raise AssertionError("a transform function ends in a tuple")


def _transform_of(mod: IRModule, name: str) -> relax.Function | None:
    """The transform function that an earlier pass made."""
    found = [func for gvar, func in mod.functions_items() if gvar.name_hint == name]
    return found[0] if found and SOURCE_NAMES in (found[0].attrs or {}) else None


def _check_names(mod: IRModule, transform: str, func: relax.Function, composed: bool) -> None:
    """An error for each name that is made and that the module has already."""
    name = transform.removesuffix(TRANSFORM_SUFFIX)
    functions = [gvar.name_hint for gvar in mod.get_global_vars()]
    counts = Counter(argument.name for argument in func.params)
    counts[transform] += functions.count(transform) + (0 if composed else 1)
    for clash in (taken for taken, count in counts.items() if count > 1):
        message = f"INT4 weights need the name `{clash}`, which {name} or another function has"
        emit(Diagnostic.error("name-taken", message, function=name, help="rename it"))

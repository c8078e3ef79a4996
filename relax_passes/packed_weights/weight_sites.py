"""Find where a Relax function multiplies by a weight or looks rows of one up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, Op

from ..op._affine import FLOATS

MATMUL, TAKE = Op.get("relax.matmul"), Op.get("relax.take")
_PERMUTE, _CAST, _RESHAPE = (
    Op.get(f"relax.{name}") for name in ("permute_dims", "astype", "reshape")
)
_CONVOLUTIONS = tuple(
    Op.get(f"relax.nn.conv{rank}d{kind}") for rank in (1, 2, 3) for kind in ("", "_transpose")
)
_CONVOLUTION = ("convolution", "only weights of matrix products, and embeddings, have INT4 kernels")


@dataclass(frozen=True)
class WeightSite:
    """A call that reads a weight W[n, k].

    `source` is the function argument or constant; `transposed` tells that it is stored as (k, n).
    `reason` is why it can't be quantized, as (code, message), or None.
    """

    binding: relax.Var
    call: relax.Call
    kind: str  # "matmul", "head", "embedding" or "convolution"
    source: relax.Expr
    name: str
    transposed: bool
    reason: tuple[str, str] | None

    @property
    def packing(self) -> tuple[relax.Expr, bool]:
        """Sites that agree in it read the same packed parts."""
        return self.source, self.transposed

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)"""
        rows, columns = (int(extent) for extent in self.source.ty.shape)
        return (columns, rows) if self.transposed else (rows, columns)


def weights_of(func: relax.Function) -> set[relax.Var]:
    """The arguments of `func` after ``num_input``; none without that attribute."""
    inputs = int((func.attrs or {}).get("num_input", len(func.params)))
    return set(func.params[inputs:])


def argument_names(mod: IRModule) -> set[str]:
    """Of all Relax functions."""
    functions = [f for f in mod.functions.values() if isinstance(f, relax.Function)]
    return {argument.name for func in functions for argument in func.params}


def find_weight_sites(func: relax.Function) -> Iterator[WeightSite]:
    """Every matmul and axis-0 take in `func` that reads a weight or a constant; and, with the
    reason "convolution", convolutions that do.

    In a function without ``num_input``, a product with an argument is yielded too, with the reason
    "not-a-weight"; products of two computed values are not.
    """
    weights = weights_of(func)
    arguments = set() if "num_input" in (func.attrs or {}) else set(func.params)
    bound = {binding.var: binding.value for binding in bindings_of(func.body)}
    tables = set()
    for variable, value in bound.items():
        if isinstance(value, relax.Call) and value.op == TAKE and _takes_rows(value):
            source, transposed, _ = trace_weight(value.args[0], bound)
            if isinstance(source, GenericConst) or source in weights:
                tables.add(source)
                yield _site(variable, value, "embedding", source, transposed, weights, ())
    last = _calls_before_no_matmul(func)
    for variable, value in bound.items():
        if isinstance(value, relax.Call) and value.op in _CONVOLUTIONS:
            source, _, _ = trace_weight(value.args[1], bound)
            if isinstance(source, GenericConst) or source in weights:
                name = weight_name(source, variable)
                yield WeightSite(variable, value, "convolution", source, name, False, _CONVOLUTION)
        if not (isinstance(value, relax.Call) and value.op == MATMUL):
            continue
        source, flipped, through = trace_weight(value.args[1], bound)
        if not (isinstance(source, GenericConst) or source in weights):
            left, _, _ = trace_weight(value.args[0], bound)
            if left in weights:
                yield _on_the_left(variable, value, left)
                continue
            if through or source not in arguments:
                continue
        onto_vocabulary = _rows(value) in {_table_rows(table) for table in tables}
        is_head = source in tables or (variable in last and onto_vocabulary)
        kind = "head" if is_head else "matmul"
        yield _site(variable, value, kind, source, not flipped, weights, through)


def bindings_of(body: relax.SeqExpr) -> Iterator[relax.Binding]:
    """All bindings in order, those of branches too."""
    for block in body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from bindings_of(binding.value.true_branch)
                yield from bindings_of(binding.value.false_branch)
            yield binding


def weight_name(source: relax.Expr, binding: relax.Var) -> str:
    """The parameter's name; a constant is named after the binding that reads it."""
    return source.name if isinstance(source, relax.Var) else f"constant of {binding.name}"


def _site(
    variable: relax.Var,
    call: relax.Call,
    kind: str,
    source: relax.Expr,
    transposed: bool,
    weights: set[relax.Var],
    through: tuple[str, ...],
) -> WeightSite:
    reason = reason_against(call, kind, source, weights, through)
    return WeightSite(
        variable, call, kind, source, weight_name(source, variable), transposed, reason
    )


def reason_against(
    call: relax.Call,
    kind: str,
    source: relax.Expr,
    weights: set[relax.Var],
    through: tuple[str, ...],
    dtypes: tuple[str, ...] = FLOATS,
) -> tuple[str, str] | None:
    """Why the weight of `call`, one of `dtypes`, can't be quantized, or None."""
    ty = source.ty
    if isinstance(source, relax.Var) and source not in weights:
        return "not-a-weight", (
            "it is an input of the function; pass params={...} with this name, or set the "
            "function's attribute num_input to the number of inputs before the weights"
        )
    if through:
        return "weight-is-computed", f"the weight reaches the product through {', '.join(through)}"
    if ty.ndim != 2:
        return "weight-is-not-a-matrix", f"the weight is {ty}; only matrices are quantized"
    if not all(isinstance(extent, int | tirx.IntImm) for extent in ty.shape):
        return "symbolic-weight-shape", f"the weight is {ty}; its shape must be static"
    if 0 in list(ty.shape):
        return "weight-is-empty", f"the weight is {ty}, without elements"
    activation = call.ty if kind == "embedding" else call.args[0].ty
    if not isinstance(activation.shape, relax.ShapeExpr):
        return "activation-shape-unknown", (
            f"it is read with {activation}; R.match_cast that to a shape, symbolic or not"
        )
    for what, dtype, known in (
        ("weight", ty.dtype, dtypes),
        ("activation", activation.dtype, FLOATS),
        ("result", call.ty.dtype, FLOATS),
    ):
        if str(dtype) not in known:
            return "dtype-not-supported", (
                f"the {what} is {dtype}; INT4 kernels take float16, bfloat16 and float32 "
                '(from_pretrained(…, dtype="float32"), or model.float() before from_torch)'
            )
    return None


def trace_weight(
    expr: relax.Expr, bound: dict[relax.Var, relax.Expr], stops: Sequence[Op] = ()
) -> tuple[relax.Expr | None, bool, tuple[str, ...]]:
    """(source, flipped, ops on the way) of an operand; source None if it is a computed value.

    Matrix transposes and float casts lead through; an op that only reads weights is listed. The
    result of a call of one of `stops` is a source, too.
    """
    flipped = False
    through: list[str] = []
    while isinstance(expr, relax.Var) and expr in bound:
        value = bound[expr]
        if isinstance(value, relax.Var | GenericConst):
            expr = value
            continue
        if not isinstance(value, relax.Call) or not value.args:
            return None, False, ()
        if value.op in stops:
            return expr, flipped, tuple(reversed(through))
        if value.op == _PERMUTE and _is_matrix_transpose(value):
            flipped = not flipped
        elif not (_is_float_cast(value) or (value.op == _RESHAPE and _same_shape(value))):
            if not _reads_one_tensor(value):
                return None, False, ()
            through.append(str(value.op.name).replace("relax.", "R."))
        expr = value.args[0]
    if isinstance(expr, relax.Var | GenericConst) and isinstance(expr.ty, relax.TensorType):
        return expr, flipped, tuple(reversed(through))
    return None, False, ()


def _on_the_left(variable: relax.Var, call: relax.Call, source: relax.Var) -> WeightSite:
    reason = ("weight-on-the-left", "the weight is the left operand; write x @ W.T")
    return WeightSite(variable, call, "matmul", source, source.name, False, reason)


def _reads_one_tensor(call: relax.Call) -> bool:
    tensors = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType)]
    return len(tensors) == 1 and isinstance(call.op, Op)


def _is_matrix_transpose(call: relax.Call) -> bool:
    axes = call.attrs["axes"]
    return call.args[0].ty.ndim == 2 and (axes is None or [int(a) % 2 for a in axes] == [1, 0])


def _is_float_cast(call: relax.Call) -> bool:
    """A cast to an integer or to bfloat16 loses more than INT4 codes are computed from."""
    if call.op != _CAST:
        return False
    return str(call.ty.dtype) in ("float32", "float16", str(call.args[0].ty.dtype))


def _same_shape(call: relax.Call) -> bool:
    return tvm_ffi.structural_equal(call.args[0].ty.shape, call.ty.shape)


def _takes_rows(call: relax.Call) -> bool:
    ty = call.args[0].ty
    return isinstance(ty, relax.TensorType) and ty.ndim == 2 and call.attrs["axis"] == 0


def _rows(call: relax.Call) -> int | None:
    extent = call.ty.shape[-1] if isinstance(call.ty.shape, relax.ShapeExpr) else None
    return int(extent) if isinstance(extent, int | tirx.IntImm) else None


def _table_rows(table: relax.Expr) -> int:
    return int(table.ty.shape[0])


def _calls_before_no_matmul(func: relax.Function) -> set[relax.Var]:
    """Variables whose value reaches no matmul: the products among them are the last ones."""
    feeding: set[relax.Var] = set()
    last: set[relax.Var] = set()
    for block in reversed(func.body.blocks):
        for binding in reversed(block.bindings):
            reaches = binding.var in feeding
            if not reaches:
                last.add(binding.var)
            if reaches or _multiplies(binding.value):
                feeding.update(relax.analysis.free_vars(binding.value))
    return last


def _multiplies(value: relax.Expr) -> bool:
    if isinstance(value, relax.If):
        branches = (value.true_branch, value.false_branch)
        return any(_multiplies(b.value) for branch in branches for b in bindings_of(branch))
    return isinstance(value, relax.Call) and value.op == MATMUL

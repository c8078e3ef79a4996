"""Let a product write the columns that its readers take. Runs after FuseTIR, for llvm.

Leaves alone, with a note: a result that anything else reads too, and what would be no kernel of the
rule Matmul.
"""

from __future__ import annotations

from collections import defaultdict

import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import GlobalVar, IRModule, Op
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.diagnostics import Diagnostic, emit
from tir_schedules.matmul.recognise import recognise
from tir_schedules.tir_nodes import collect

from .op.columns import COLUMNS
from .packed_weights.weight_sites import bindings_of

_CALL_TIR = Op.get("relax.call_tir")


@tvm.transform.module_pass(opt_level=0, name="StoreColumns")
class StoreColumns:
    """Merge a product with the kernels that read `R.sits.columns` of its result.

    The result is then no tensor, and the columns are no copies of it.

    Before::

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def matmul(
                x: T.Buffer((T.int64(4), T.int64(8)), "float32"),
                w: T.Buffer((T.int64(8), T.int64(32)), "float32"),
                y: T.Buffer((T.int64(4), T.int64(32)), "float32"),
            ):
                for i, j, k in T.grid(T.int64(4), T.int64(32), T.int64(8)):
                    with T.sblock("matmul"):
                        vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                        with T.init():
                            y[vi, vj] = T.float32(0)
                        y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vk, vj]

            @T.prim_func(private=True, s_tir=True)
            def left(
                y: T.Buffer((T.int64(4), T.int64(32)), "float32"),
                out: T.Buffer((T.int64(4), T.int64(16)), "float32"),
            ):
                for i, j in T.grid(T.int64(4), T.int64(16)):
                    with T.sblock("left"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        T.sblock_attr({"columns": 0})
                        out[vi, vj] = y[vi, vj]

            @T.prim_func(private=True, s_tir=True)
            def right(
                y: T.Buffer((T.int64(4), T.int64(32)), "float32"),
                out: T.Buffer((T.int64(4), T.int64(16)), "float32"),
            ):
                for i, j in T.grid(T.int64(4), T.int64(16)):
                    with T.sblock("right"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        T.sblock_attr({"columns": 16})
                        out[vi, vj] = y[vi, vj + T.int64(16)]

            @R.function
            def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 32), "float32")):
                cls = Before
                with R.dataflow():
                    y = R.call_tir(cls.matmul, (x, w), out_ty=R.Tensor((4, 32), "float32"))
                    a = R.call_tir(cls.left, (y,), out_ty=R.Tensor((4, 16), "float32"))
                    b = R.call_tir(cls.right, (y,), out_ty=R.Tensor((4, 16), "float32"))
                    R.output(a, b)
                return (a, b)

    After::

        @I.ir_module
        class After:
            @T.prim_func(private=True, s_tir=True)
            def matmul_columns(
                x: T.Buffer((T.int64(4), T.int64(8)), "float32"),
                w: T.Buffer((T.int64(8), T.int64(32)), "float32"),
                a: T.Buffer((T.int64(4), T.int64(16)), "float32"),
                b: T.Buffer((T.int64(4), T.int64(16)), "float32"),
            ):
                T.func_attr({"tirx.noalias": True})
                y = T.sblock_alloc_buffer((T.int64(4), T.int64(32)))
                for i, j, k in T.grid(T.int64(4), T.int64(32), T.int64(8)):
                    with T.sblock("matmul"):
                        vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                        with T.init():
                            y[vi, vj] = T.float32(0)
                        y[vi, vj] = y[vi, vj] + x[vi, vk] * w[vk, vj]
                for i, j in T.grid(T.int64(4), T.int64(16)):
                    with T.sblock("left"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        T.sblock_attr({"columns": 0})
                        a[vi, vj] = y[vi, vj]
                for i, j in T.grid(T.int64(4), T.int64(16)):
                    with T.sblock("right"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        T.sblock_attr({"columns": 16})
                        b[vi, vj] = y[vi, vj + T.int64(16)]

            @R.function
            def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 32), "float32")):
                cls = After
                with R.dataflow():
                    parts = R.call_tir(
                        cls.matmul_columns, (x, w),
                        out_ty=[R.Tensor((4, 16), "float32"), R.Tensor((4, 16), "float32")],
                    )
                    a = parts[0]
                    b = parts[1]
                    R.output(a, b)
                return (a, b)
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        out, found = mod.clone(), False
        for gvar, func in mod.functions_items():
            if isinstance(func, relax.Function) and (readers := _readers_of_products(mod, func)):
                merger, found = _Merger(out, readers), True
                merged = merger.visit_expr(func)
                out = merger.builder_.get()
                out[gvar] = merged
        out = relax.transform.DeadCodeElimination()(out) if found else mod
        for gvar, func in out.functions_items():
            if isinstance(func, relax.Function):
                _note_copies(out, gvar.name_hint, func)
        return out


def _note_copies(mod: IRModule, name: str, func: relax.Function) -> None:
    """Say which columns are copies of those of a product after all."""
    for binding in bindings_of(func.body):
        if not _is_kernel_call(binding.value):
            continue
        kernel = mod[binding.value.args[0]]
        if _takes_columns(kernel) and recognise(kernel) is None:
            message = "columns of a product are copied: its kernel could not write them itself"
            where = {"function": name, "binding": binding.var.name}
            emit(Diagnostic.note("columns-copied", message, **where))


def _readers_of_products(
    mod: IRModule, func: relax.Function
) -> dict[relax.Call, tuple[relax.Var, list[relax.Call]]]:
    """By call its result and the readers, where they are kernels that only take columns of it."""
    users: dict[relax.Var, list[relax.Expr]] = defaultdict(list)
    place: dict[relax.Var, int] = {}
    for number, binding in enumerate(bindings_of(func.body)):
        place[binding.var] = number
        for var in relax.analysis.free_vars(binding.value):
            users[var].append(binding.value)

    def is_before(arg: relax.Expr, product: relax.Var) -> bool:
        return place.get(arg, -1) <= place[product]

    found = {}
    for binding in bindings_of(func.body):
        y, readers = binding.var, users[binding.var]
        if (
            not isinstance(y, relax.DataflowVar)
            or not _is_kernel_call(binding.value)
            or not readers
        ):
            continue
        if all(
            _is_kernel_call(reader)
            and _takes_columns(mod[reader.args[0]])
            and all(is_before(arg, y) for arg in reader.args[1])
            for reader in readers
        ) and recognise(mod[binding.value.args[0]]):
            found[binding.value] = y, readers
    return found


def _is_kernel_call(value: relax.Expr) -> bool:
    """Whether `value` is a call of a PrimFunc with one result, and no symbols beside tensors."""
    is_call = isinstance(value, relax.Call) and value.op == _CALL_TIR and len(value.args) == 2
    return is_call and isinstance(value.ty, relax.TensorType)


def _takes_columns(kernel: tirx.PrimFunc) -> bool:
    return any(COLUMNS in block.annotations for block in collect(kernel.body, s_tir.SBlock))


@mutator
class _Merger(PyExprMutator):
    def __init__(
        self, mod: IRModule, readers: dict[relax.Call, tuple[relax.Var, list[relax.Call]]]
    ) -> None:
        super().__init__(mod)
        self.mod, self.readers = mod, readers
        self.fields: dict[relax.Call, relax.Expr] = {}
        self.kernels: dict[object, GlobalVar | None] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call in self.fields:
            return self.fields[call]
        if call in self.readers:
            self._merge(call, *self.readers[call])
        return super().visit_call_(call)

    def _merge(self, product: relax.Call, y: relax.Var, readers: list[relax.Call]) -> None:
        """Emit one call in place of all; `fields` gets the results of the readers."""
        calls = [product, *readers]
        args = list(dict.fromkeys(arg for call in calls for arg in call.args[1] if arg != y))
        read = tuple(
            (c.args[0], *(-1 if a == y else args.index(a) for a in c.args[1])) for c in calls
        )
        key = read, tuple(str(arg.ty) for arg in args)
        if key not in self.kernels:
            self.kernels[key] = self._kernel(product, y, readers, args)
        kernel = self.kernels[key]
        if kernel is None:
            return
        inputs = [self.visit_expr(arg) for arg in args]
        results = [reader.ty for reader in readers]
        merged = self.builder_.emit(relax.call_tir(kernel, inputs, results))
        if len(readers) == 1:  # no tuple
            self.fields[readers[0]] = merged
            return
        self.fields |= {reader: relax.TupleGetItem(merged, i) for i, reader in enumerate(readers)}

    def _kernel(
        self, product: relax.Call, y: relax.Var, readers: list[relax.Call], args: list[relax.Expr]
    ) -> GlobalVar | None:
        """The PrimFunc of `args` that computes what all `readers` do, by TVM's FuseTIR."""
        bb = relax.BlockBuilder()
        params = [relax.Var(f"p{i}", arg.ty) for i, arg in enumerate(args)]
        values = dict(zip(args, params, strict=True))

        def call(original: relax.Call) -> relax.Var:
            kernel = bb.add_func(self.mod[original.args[0]], original.args[0].name_hint)
            given = [values[arg] for arg in original.args[1]]
            return bb.emit(relax.call_tir(kernel, given, original.ty))

        with bb.function("merged", params, attrs={"Primitive": True}, private=True):
            with bb.dataflow():
                values[y] = call(product)
                results = [call(reader) for reader in readers]
                result = bb.emit_output(relax.Tuple(results) if len(results) > 1 else results[0])
            merged = bb.emit_func_output(result)
        inputs = [relax.Var(f"x{i}", arg.ty) for i, arg in enumerate(args)]
        with bb.function("main", inputs):
            bb.emit_func_output(bb.emit(relax.Call(merged, inputs)))
        mod = bb.get()
        mod[merged] = relax.utils.copy_with_new_vars(mod[merged])  # shape variables of its own
        fused = relax.transform.FuseTIR()(mod)
        (kernel,) = (f for _, f in fused.functions_items() if isinstance(f, tirx.PrimFunc))
        if recognise(kernel) is None:
            return None
        name = f"{product.args[0].name_hint}_{COLUMNS}"
        return self.builder_.add_func(kernel.without_attr("global_symbol"), name)

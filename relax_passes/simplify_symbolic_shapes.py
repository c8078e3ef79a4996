"""Make symbolic shapes as simple as the bounds of their variables allow. Runs before LegalizeOps.

An op whose shape stays unknown cannot be lowered; each one is an error. Leaves alone: ops whose
shape depends on data (nonzero, unique, dynamic_strided_slice), and what match_cast already binds.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import Op
from tvm.ir.transform import PassContext
from tvm.relax import op as R
from tvm.relax.expr_functor import PyExprMutator, mutator

from sits_tvm.diagnostics import Diagnostic, emit

from ._map_functions import map_functions
from .index_analysis.dim_bounds import bounded_analyzer

_INT64_MAX = (1 << 63) - 1
_DATA_DEPENDENT = ("FDataDependent", "FCallPacked")


@tvm.transform.module_pass(opt_level=0, name="SimplifySymbolicShapes")
class SimplifySymbolicShapes:
    """Use ``tir_var_lower_bound`` and ``tir_var_upper_bound`` to simplify shapes.

    A slice that lies inside its tensor for every allowed value of the variables says so with
    ``assume_inbound``, so that its length is ``end - begin``; any other shape with a min or max
    that the bounds decide is bound by ``match_cast``. Types after it are inferred anew.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor((1, "s"), "float32")):
                s = T.int64()
                R.func_attr({"tir_var_lower_bound": {"s": 2}})
                with R.dataflow():
                    first = R.strided_slice(x, (1,), (0,), (1,), (1,))
                    y = R.add(first, x)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor((1, "s"), "float32")) -> R.Tensor((1, "s"), "float32"):
                s = T.int64()
                R.func_attr({"tir_var_lower_bound": {"s": 2}})
                with R.dataflow():
                    first = R.strided_slice(x, (1,), (0,), (1,), (1,), assume_inbound=True)
                    y = R.add(first, x)
                    R.output(y)
                return y
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        def visit(name: str, func: relax.Function) -> relax.Function:
            new = _Simplifier(mod, func).visit_expr(func)
            for binding in _unknown_shapes(new):
                emit(_unknown_shape(name, binding))
            return new

        return map_functions(mod, visit)


@mutator
class _Simplifier(PyExprMutator):
    def __init__(self, mod: IRModule, func: relax.Function) -> None:
        super().__init__(mod)
        self.analyzer = bounded_analyzer(func)
        self.cast = set(_cast_variables(func))

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        is_slice = getattr(call.op, "name", "") == "relax.strided_slice"
        inbound = self.inbound_slice(call) if is_slice else None
        return call if inbound is None else inbound

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        var = self.visit_expr(binding.var)
        simple = None if binding.var in self.cast else self.simplified(var.ty)
        if simple is not None:
            self.set_var_remap(binding.var, self.builder_.match_cast(var, simple))

    def simplified(self, ty: tvm.ir.Type) -> relax.TensorType | None:
        """`ty` without the minima and maxima that the bounds decide; None if there are none."""
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            return None
        dims = [self.analyzer.simplify(d) if _has_extremum(d) else d for d in ty.shape]
        if all(
            _has_extremum(new) == _has_extremum(d) for new, d in zip(dims, ty.shape, strict=True)
        ):
            return None
        return relax.TensorType(dims, ty.dtype, ty.vdevice)

    def inbound_slice(self, call: relax.Call) -> relax.Expr | None:
        """The slice with bounds from 0 to the length of each axis, or None if not provable."""
        x, axes, begins, ends = call.args[:4]
        steps = (
            call.args[4]
            if len(call.args) > 4
            else relax.Tuple([tirx.IntImm("int64", 1)] * len(axes))
        )
        shape = x.ty.shape
        if call.attrs.assume_inbound or not isinstance(shape, relax.ShapeExpr):
            return None
        spans = []
        for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
            span = self.span(shape[int(axis)], begin, end, step)
            if span is None:
                return None
            spans.append(span)
        if all(isinstance(d, tirx.IntImm) for d in call.ty.shape):
            return None
        begins, ends = zip(*spans, strict=True)
        return R.strided_slice(x, axes, begins, ends, steps, assume_inbound=True)

    def span(
        self, size: tirx.Expr, begin: tirx.Expr, end: tirx.Expr, step: tirx.Expr
    ) -> tuple[tirx.Expr, tirx.Expr] | None:
        prove = self.analyzer.can_prove
        if not (isinstance(step, tirx.IntImm) and int(step) > 0):
            return None
        end = size if isinstance(end, tirx.IntImm) and int(end) >= _INT64_MAX else end
        begin, end = (size + b if prove(b < 0) else b for b in (begin, end))
        if prove(end >= size):
            end = size
        if not (prove(begin >= 0) and prove(begin <= end) and prove(end <= size)):
            return None
        return self.analyzer.simplify(begin), self.analyzer.simplify(end)


def _has_extremum(dim: tirx.Expr) -> bool:
    if isinstance(dim, tirx.Min | tirx.Max | tirx.Select):
        return True
    return any(_has_extremum(getattr(dim, side)) for side in "ab" if hasattr(dim, side))


def _bindings(func: relax.Function) -> Iterator[relax.expr.Binding]:
    found: list[relax.expr.Binding] = []

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, relax.SeqExpr):
            found.extend(b for block in expr.blocks for b in block.bindings)

    relax.analysis.post_order_visit(func, look)
    yield from found


def _cast_variables(func: relax.Function) -> Iterator[relax.Var]:
    for binding in _bindings(func):
        if isinstance(binding, relax.MatchCast) and isinstance(binding.value, relax.Var):
            yield binding.value


def _unknown_shapes(func: relax.Function) -> Iterator[relax.VarBinding]:
    """Bindings of ops that need the shapes of their result and arguments, where one is unknown."""
    for binding in _bindings(func):
        value = binding.value
        if not (isinstance(value, relax.Call) and isinstance(value.op, Op)):
            continue
        if value.op.get_attr("FLegalize") is None or any(map(value.op.get_attr, _DATA_DEPENDENT)):
            continue
        if value.op.get_attr("RequiresArgumentShapes") is False:  # R.inspect: read at run time
            continue
        if any(_is_unknown(expr.ty) for expr in (binding.var, *value.args)):
            yield binding


def _is_unknown(ty: tvm.ir.Type) -> bool:
    if isinstance(ty, relax.TupleType):
        return any(_is_unknown(field) for field in ty.fields)
    return isinstance(ty, relax.TensorType) and not isinstance(ty.shape, relax.ShapeExpr)


def _unknown_shape(name: str, binding: relax.VarBinding) -> Diagnostic:
    call = binding.value
    types = ", ".join(str(arg.ty) for arg in call.args)
    return Diagnostic.error(
        "shape-unknown",
        f"R.{call.op.name.removeprefix('relax.')} of {types} has no known shape",
        function=name,
        binding=binding.var.name,
        help='give the bounds of the shape variables, as in R.func_attr({"tir_var_lower_bound": '
        '{"s": 1}}), or bind the shape with R.match_cast',
    )

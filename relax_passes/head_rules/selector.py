"""The walk from heads back to the weights that make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tvm import relax
from tvm.ir import GenericConst, Op

from .rules import RULES
from .selection import LINEAR, VIEW, NotPerHead, Selection, Writer, op_name

_SPLIT, _MATMUL = Op.get("relax.split"), Op.get("relax.matmul")


class HeadSelector:
    """Walks back from a tensor to its weights.

    Parameters
    ----------
    bound : what each variable of the function is bound to
    writer : Writer
    stops : variables that are handed to `writer.leaf` like an argument
    """

    def __init__(
        self,
        bound: Mapping[relax.Var, relax.Expr],
        writer: Writer,
        stops: frozenset[relax.Var] = frozenset(),
    ) -> None:
        self.bound, self.writer, self.stops = bound, writer, stops
        self.made: dict[tuple, relax.Expr] = {}

    def select(self, expr: relax.Expr, selection: Selection) -> relax.Expr:
        """`expr` with the selected entries only.

        Raises
        ------
        NotPerHead
            Where an op mixes the entries of the axis, or is not known.
        """
        if expr in self.stops or expr not in self.bound:
            if not isinstance(expr, relax.Var | GenericConst):
                return self._value(expr, selection)
            return self.writer.leaf(expr, selection)
        key = (expr, *selection.key)
        if key not in self.made:
            value = self._value(self.bound[expr], selection)
            self.made[key] = self.writer.emit(value, expr)
        return self.made[key]

    def _value(self, value: relax.Expr, selection: Selection) -> relax.Expr:
        if isinstance(value, relax.Var | GenericConst):
            return self.select(value, selection)
        if isinstance(value, relax.TupleGetItem):
            return self._field(value, selection)
        rule = RULES.get(value.op) if isinstance(value, relax.Call) else None
        if rule is None:
            name = op_name(value)
            raise NotPerHead(f"{name} is not known to treat every head alike")
        return rule(self, value, selection)

    def _field(self, value: relax.TupleGetItem, selection: Selection) -> relax.Expr:
        """A field of `R.split`: of the selected axis, the entries from where it begins."""
        split = self.bound.get(value.tuple_value)
        if not (isinstance(split, relax.Call) and split.op == _SPLIT):
            raise NotPerHead("a field of a tuple that is not a split")
        axis = int(split.attrs["axis"]) % split.args[0].ty.ndim
        if axis == selection.axis:
            begin = sum(int(f.shape[axis]) for f in list(split.ty.fields)[: value.index])
            self.writer.passes(VIEW, value.tuple_value)
            moved = replace(selection, index=selection.index + begin)
            return self.select(split.args[0], moved)
        self.writer.passes(LINEAR)
        parts = relax.Call(split.op, [self.select(split.args[0], selection)], split.attrs)
        return relax.TupleGetItem(self.writer.emit(parts, value.tuple_value), value.index)

    def is_projected(self, expr: relax.Expr) -> bool:
        """With one head, an operand that is broadcast has the extent of one that is not."""
        todo: list[relax.Expr] = [expr]
        seen: set[relax.Expr] = set()
        while todo:
            value = self.bound.get(todo.pop())
            if value is None or value in seen:
                continue
            seen.add(value)
            if isinstance(value, relax.Call) and value.op == _MATMUL:
                return True
            todo += list(relax.analysis.free_vars(value))
        return False

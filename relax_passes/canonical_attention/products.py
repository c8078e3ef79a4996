"""Products of two tensors, matmul and einsum alike: which elements meet in which result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax

from ..index_analysis.index_domain import Index, integer, is_integer
from .elements import Element
from .graph import Graph, NearMiss, shape_of

SUMMED = "+"  # the letter of the axis summed over
UNIT = "1"  # of axes that are broadcast


@dataclass(frozen=True)
class Product:
    """result[o] = Σ_s left[…] · right[…]: each axis of each is named by a letter.

    Axes of the operands that are broadcast have the letter `UNIT`.
    """

    result: relax.Var
    operands: tuple[relax.Expr, relax.Expr]
    letters: tuple[Sequence[str], Sequence[str]]
    out: Sequence[str]

    def element(self, side: int, at: Sequence[Index], summed: Index) -> Element:
        """The element of an operand that meets result[at] in the term `summed`."""
        place = {**dict(zip(self.out, at, strict=True)), SUMMED: summed, UNIT: integer(0)}
        return Element(self.operands[side], tuple(place[c] for c in self.letters[side]))

    def summed_extent(self) -> Index:
        letters = list(self.letters[0])
        return shape_of(self.operands[0])[letters.index(SUMMED)]


def product_of(graph: Graph, tensor: relax.Expr) -> Product | None:
    """The product that `tensor` is bound to, or None.

    Raises
    ------
    NearMiss
        For an einsum that sums over more than one axis or takes a diagonal.
    """
    name, call = graph.call(tensor)
    if name == "matmul" and min(arg.ty.ndim for arg in call.args) >= 2:
        return _matmul(call, tensor)
    operands = graph.of(call.args[0]) if name == "einsum" else None
    if isinstance(operands, relax.Tuple) and len(operands.fields) == 2:
        return _einsum(str(call.attrs.subscripts), operands, tensor)
    return None


def _matmul(call: relax.Call, result: relax.Var) -> Product:
    left, right = call.args
    rank = result.ty.ndim
    batch = [f"b{i}" for i in range(rank - 2)]
    letters = (
        [*_batch_letters(left, batch), "m", SUMMED],
        [*_batch_letters(right, batch), SUMMED, "n"],
    )
    return Product(result, (left, right), letters, [*batch, "m", "n"])


def _batch_letters(operand: relax.Expr, batch: list[str]) -> list[str]:
    count = operand.ty.ndim - 2
    own = shape_of(operand)[:count]
    pairs = zip(own, batch[len(batch) - count :], strict=True)
    return [UNIT if is_integer(e, 1) else c for e, c in pairs]


def _einsum(subscripts: str, operands: relax.Tuple, result: relax.Var) -> Product:
    spelled = subscripts.replace(" ", "")
    inputs, _, out = spelled.partition("->")
    left, _, right = inputs.partition(",")
    summed = (set(left) | set(right)) - set(out)
    has_all = set(out) <= set(left) | set(right) and summed <= set(left) & set(right)
    repeated = any(len(set(part)) < len(part) for part in (left, right, out))
    if len(summed) != 1 or not has_all or repeated or "." in spelled:
        raise NearMiss("einsum-form", f"einsum {spelled!r} is no batched matrix product", result)
    rename = {next(iter(summed)): SUMMED}
    letters = [rename.get(c, c) for c in left], [rename.get(c, c) for c in right]
    return Product(result, tuple(operands.fields), letters, list(out))

"""Masks and guards of a block as what `relax.sits.attention` says: causal, window, bias, empty_row.

A mask hides in one of two ways: with -inf, after which a row that shows nothing is NaN (or 0, by a
guard), or with the lowest number of the dtype, to which adding a score changes nothing, after
which such a row is uniform. Everything else that is added is a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
from tvm import relax
from tvm.relax import op as R

from ..index_analysis.index_domain import Index
from ..index_analysis.visibility import (
    Lookup,
    Visibility,
    additive_visibility,
    every_row_sees_a_key,
    visibility,
)
from .bounds import Masking, both, bounds_of
from .graph import NearMiss, dtype_of
from .scores import Mask

_ABSORBS = -1e30  # float32 and bfloat16 scores vanish beside it


@dataclass(frozen=True)
class _Seen:
    """A mask as a tensor over (b, h, i, j), and the keys that it hides with `fill`, if known."""

    mask: Mask
    tensor: relax.Expr
    shown: Visibility | None
    fill: float

    @property
    def is_lowest(self) -> bool:
        return self.fill != -math.inf

    @property
    def hides_or_adds(self) -> bool:
        if self.shown is None:
            return True
        bounds = (self.shown.upper, self.shown.lower, *self.shown.rest)
        return any(bound is not None for bound in bounds)


class MaskReader:
    """Masks of one block.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Emits what a bias is made of.
    lookup : Lookup
    shape : (B, H, Sq, Sk)
    dtype : str
        Of the op's scores.
    zero_rows : str
        As `GuardReader.zero_rows`.
    uniform_rows : bool
        Whether rows of nothing but the lowest number have equal weights.
    """

    def __init__(
        self,
        bb: relax.BlockBuilder,
        lookup: Lookup,
        shape: Sequence[Index],
        dtype: str,
        zero_rows: str,
        uniform_rows: bool = True,
    ) -> None:
        self.bb, self.lookup, self.shape = bb, lookup, list(shape)
        self.dtype, self.zero_rows, self.uniform_rows = dtype, zero_rows, uniform_rows

    def read(self, masks: Sequence[tuple[Mask, relax.Expr]]) -> Masking:
        """
        Raises
        ------
        NearMiss
            For a mask that the op cannot say.
        """
        seen = [self._see(mask, tensor) for mask, tensor in masks]
        seen = [one for one in seen if one.hides_or_adds]
        for one in seen:
            self._check_dtype(one)
        self._check_rows(seen)
        whole = self._as_visibility(seen)
        if whole is not None:
            return whole
        if any(one.is_lowest for one in seen if one.mask.fill is not None):
            return self._as_bias(seen)
        return self._as_bias_and_bounds(seen)

    # Each mask by itself.

    def _see(self, mask: Mask, tensor: relax.Expr) -> _Seen:
        if mask.fill is not None:
            _check_fill(mask)
            shown = visibility(tensor, self.lookup, self.shape, visible=not mask.hides)
            return _Seen(mask, tensor, shown, mask.fill)
        found = additive_visibility(tensor, self.lookup, self.shape) if mask.sign > 0 else None
        if found is None or not (found[1] == 0.0 or self._absorbs(mask, *found)):
            return _Seen(mask, tensor, None, 0.0)
        return _Seen(mask, tensor, found[0], found[1] or -math.inf)

    def _absorbs(self, mask: Mask, shown: Visibility, fill: float) -> bool:
        """Whether what is added leaves nothing of a score; -65504 does only beside other keys."""
        is_exact = fill == -math.inf or mask.dtype != "float16" or self._is_full(shown)
        return is_exact and _is_hiding(fill, mask.dtype)

    def _check_dtype(self, one: _Seen) -> None:
        """A mask added in float16 rounds whole rows to -inf: float32 would give other values."""
        absorbs = one.shown is not None and not one.is_lowest
        if one.mask.dtype == self.dtype or absorbs:
            return
        if self.dtype == "float16":
            message = f"one mask is applied to float16 scores, another to {one.mask.dtype} ones"
            raise NearMiss("masks-in-two-dtypes", message, one.mask.binding)
        if one.mask.dtype == "float16" and one.mask.fill is None and not self._is_full(one.shown):
            message = (
                f"a mask is added to float16 scores; added in {self.dtype}, it would round "
                "otherwise: in a row that shows no key the sum may be -inf"
            )
            raise NearMiss("mask-added-in-float16", message, one.mask.binding)

    def _check_rows(self, seen: Sequence[_Seen]) -> None:
        """exp(x) is 0 for the lowest number: without the maximum a row's sum may be nothing."""
        known = [one for one in seen if one.shown is not None]
        lowest = [one for one in known if one.is_lowest]
        together = both([one.shown for one in known if one.shown is not None])
        if lowest and not self.uniform_rows and not self._is_full(together):
            message = "softmax without the maximum, and a row may show nothing but lowest numbers"
            raise NearMiss("softmax-unstable", message, lowest[0].mask.binding)

    def _is_full(self, shown: Visibility | None) -> bool:
        return shown is not None and every_row_sees_a_key(shown, self.shape)

    # All together.

    def _as_visibility(self, seen: Sequence[_Seen]) -> Masking | None:
        """Bounds and one bool tensor, where every mask only hides, all in one way."""
        shown = [one.shown for one in seen if one.shown is not None]
        if len(shown) < len(seen):
            return None
        together = both(shown)
        is_full = every_row_sees_a_key(together, self.shape)
        lowest = [one.is_lowest for one in seen]
        later_sums = any(one.is_lowest and one.mask.fill is None for one in seen[1:])
        differ = len({one.fill for one in seen}) > 1  # a row of both shows the keys of the higher
        if not is_full and any(lowest) and (differ or later_sums):
            return None
        bounds = bounds_of(together, self.shape)
        if bounds is None:
            together = Visibility(rest=tuple(self._condition(one) for one in seen))
            bounds = Masking(proof="a mask of no form that the op has, kept as a bias")
        bias = None
        for tensor in together.rest:
            tensor = self._emitted(tensor)
            bias = tensor if bias is None else self.bb.emit(R.logical_and(bias, tensor))
        return replace(bounds, bias=bias, empty_row=self._empty_row(any(lowest) and not is_full))

    def _empty_row(self, is_uniform: bool) -> str:
        if self.zero_rows == "hidden" or (self.zero_rows == "infinite" and not is_uniform):
            return "zero"
        return "uniform" if is_uniform else "nan"

    def _condition(self, one: _Seen) -> relax.Expr:
        """A bool tensor, True where the key is visible."""
        if one.mask.fill is None:
            zero = relax.const(0.0, dtype_of(one.tensor))
            return self.bb.emit(R.equal(one.tensor, zero))
        return self.bb.emit(R.logical_not(one.tensor)) if one.mask.hides else one.tensor

    def _as_bias_and_bounds(self, seen: Sequence[_Seen]) -> Masking:
        """Masks of -inf and one or more biases: bounds where proved, the rest in the bias."""
        hiding = [one for one in seen if one.mask.fill is not None]
        together = both([one.shown for one in hiding if one.shown is not None])
        bounds = bounds_of(together, self.shape)
        if bounds is None:
            return self._as_bias(seen)
        added = [one for one in seen if one.mask.fill is None]
        is_plain = len(added) == 1 and added[0].mask.sign > 0 and not together.rest
        bias = added[0].tensor if is_plain else self._sum(added)
        for tensor in together.rest:
            hidden = relax.const(-math.inf, self.dtype)
            bias = self.bb.emit(R.where(self._emitted(tensor), bias, hidden))
        proof = "; ".join(filter(None, (bounds.proof, _names(added))))
        return replace(bounds, bias=bias, empty_row=self._empty_row(False), proof=proof)

    def _sum(self, added: Sequence[_Seen]) -> relax.Expr:
        total: relax.Expr | None = None
        for one in added:
            total = self._added(total, one)
        assert total is not None
        return total

    def _added(self, total: relax.Expr | None, one: _Seen) -> relax.Expr:
        tensor = one.tensor
        if dtype_of(tensor) != self.dtype:
            tensor = self.bb.emit(R.astype(tensor, self.dtype))
        if one.mask.sign < 0:
            tensor = self.bb.emit(R.negative(tensor))
        return tensor if total is None else self.bb.emit(R.add(total, tensor))

    def _as_bias(self, seen: Sequence[_Seen]) -> Masking:
        """One float tensor of all masks, in their order: exact, since what hides absorbs scores."""
        total: relax.Expr | None = None
        for one in seen:
            if one.mask.fill is None:
                total = self._added(total, one)
                continue
            before = relax.const(0.0, self.dtype) if total is None else total
            fill = relax.const(self._absorbing(one), self.dtype)
            total = self.bb.emit(R.where(self._condition(one), before, fill))
        assert total is not None
        added = replace(seen[-1].mask, fill=None, sign=1, dtype=self.dtype)
        whole = self._as_visibility([self._see(added, total)])
        return whole or Masking(bias=total, empty_row=self._empty_row(False), proof=_names(seen))

    def _absorbing(self, one: _Seen) -> float:
        """What float16 hides with does not absorb scores in a wider dtype: its lowest does."""
        is_narrow = one.is_lowest and one.fill > _ABSORBS
        return float(ml_dtypes.finfo(self.dtype).min) if is_narrow else one.fill

    def _emitted(self, tensor: relax.Expr) -> relax.Expr:
        return tensor if isinstance(tensor, relax.Var) else self.bb.emit(tensor)


def _names(seen: Sequence[_Seen]) -> str:
    return "a bias at " + ", ".join(f"`{one.mask.binding.name}`" for one in seen)


def _is_hiding(fill: float, dtype: str) -> bool:
    return fill <= _ABSORBS or fill == float(ml_dtypes.finfo(dtype).min)


def _check_fill(mask: Mask) -> None:
    assert mask.fill is not None
    if not _is_hiding(mask.fill, mask.dtype):
        message = f"hidden scores become {mask.fill:g}, which other scores may be below"
        raise NearMiss("fill-not-lowest", message, mask.binding)

"""Which codes a chain of quantization gives: its steps run forwards on the interval of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._values import Values
from .events import Chain, Event, Parameter, Refused, is_integer
from .parameters import agree
from .zero_points import code_of

_BITS = range(2, 9)


@dataclass(frozen=True)
class Codes:
    """The attributes of a quantize op that say which codes there are, and the zero point."""

    bits: int
    signed: bool
    narrow_range: bool
    clip_mask: str
    zero_point: Parameter | None

    @property
    def attributes(self) -> dict[str, Any]:
        names = ("bits", "signed", "narrow_range", "clip_mask")
        return {name: getattr(self, name) for name in names}


def read_codes(values: Values, chain: Chain, rank: int) -> Codes:
    """Run the events of `chain`. Raises Refused where the result is no affine quantization."""
    events = [e for e in reversed(chain.events) if not _adds_nothing(values, e)]
    shifts = [e for e in events if e.zero is not None]
    zero = _one_zero_point(values, shifts, rank)
    lo, hi, strict = _interval(values, events, shifts)
    bits, signed, narrow_range = code_width(lo, hi)
    if zero is not None:
        zero = code_of(values, zero, lo, hi)
        _check_difference(events, shifts[-1], lo, hi)
    return Codes(bits, signed, narrow_range, "strict" if strict else "rounded", zero)


def _adds_nothing(values: Values, event: Event) -> bool:
    array = values.constant(event.zero.expr) if event.zero else None
    return array is not None and not array.any()


def _one_zero_point(values: Values, shifts: list[Event], rank: int) -> Parameter | None:
    """The zero point that is first added and then subtracted; its negative may be the operand."""
    if not shifts:
        return None
    if len(shifts) != 2:
        raise Refused(
            "zero-point-once",
            f"a zero point is {'added' if shifts[0].kind == 'add' else 'subtracted'} and not taken "
            "back before the multiplication: q * scale - zero_point * scale rounds unlike "
            "(q - zero_point) * scale",
            "write (R.round(x / scale) + zero_point, clipped, - zero_point) * scale",
        )
    first, last = shifts
    if first.kind != "add" or last.kind != "subtract":
        message = f"the zero point is first {first.kind}ed, then {last.kind}ed"
        raise Refused("zero-point-sign", message, "first add it, then subtract it")
    assert first.zero is not None
    assert last.zero is not None
    if not agree(values, first.zero, last.zero, rank):
        message = "the zero point that is added is not the one that is subtracted"
        raise Refused("two-zero-points", message, "use one zero point")
    return first.zero


def _interval(
    values: Values, events: list[Event], shifts: list[Event]
) -> tuple[float, float, bool]:
    """Smallest and largest code; whether they come from a clip before the rounding."""
    lo, hi, rounded, done = -np.inf, np.inf, False, False
    first = lo, hi  # what the clips before the rounding leave
    for event in events:
        if event.kind == "round":
            rounded = True
        elif event.kind == "clip":
            if done:
                raise Refused("clip-after", "a clip follows the subtraction of the zero point")
            _check_integers(event)
            lo, hi = (float(np.clip(bound, event.lo, event.hi)) for bound in (lo, hi))
            first = first if rounded else (lo, hi)
        elif event.kind == "cast":
            _check_cast(event.dtype, lo, hi, done)
        elif event is shifts[0]:
            lo, hi = _shifted(values, event, lo, hi)
            first = _shifted(values, event, *first)
        else:
            done = True
    return lo, hi, _is_strict(first, (lo, hi))


def _is_strict(first: tuple[float, float], codes: tuple[float, float]) -> bool:
    """Whether the range that is left by the clips before the rounding is that of the codes."""
    bounds = [a == b for a, b in zip(first, codes, strict=True)]
    if any(bounds) and not all(bounds) and np.isfinite(codes).all():
        raise Refused(
            "two-clip-masks",
            "x / scale is clipped on one side before the rounding, the codes on the other after",
            "clip after the rounding",
        )
    return all(bounds)


def _check_integers(event: Event) -> None:
    for bound in (event.lo, event.hi):
        if np.isfinite(bound) and bound != round(bound):
            raise Refused("range-not-integer", f"the codes are clipped at {bound}")


def _check_cast(dtype: str, lo: float, hi: float, done: bool) -> None:
    if not is_integer(dtype):
        if dtype != "float32":
            message = f"the codes are cast to {dtype}"
            raise Refused("not-float32", message, "the quantize ops compute in float32")
        return
    info = np.iinfo(dtype)
    if not done and not (info.min <= lo and hi <= info.max):
        raise Refused(
            "cast-before-clip",
            f"codes between {lo} and {hi} are cast to {dtype}, which holds {info.min} to "
            f"{info.max}: what is outside has no defined code",
            "clip before the cast",
        )


def _shifted(values: Values, event: Event, lo: float, hi: float) -> tuple[float, float]:
    if np.isinf(lo) and np.isinf(hi):
        return lo, hi
    number = values.number(event.zero.expr) if event.zero else None
    if number is None:
        message = "the range is clipped before a zero point is added that is not one constant"
        raise Refused("range-not-constant", message, "clip after adding the zero point")
    lo, hi = lo + number, hi + number
    if is_integer(event.dtype):
        info = np.iinfo(event.dtype)
        if lo < info.min or hi > info.max:
            message = (
                f"the zero point is added in {event.dtype}, and the sums {lo:.0f} to {hi:.0f} wrap"
            )
            raise Refused("sum-wraps", message, "add in int32 or float32")
    return lo, hi


def code_width(lo: float, hi: float) -> tuple[int, bool, bool]:
    """bits, signed, narrow_range of the codes lo…hi. Raises Refused where there are none."""
    for bits in _BITS:
        half = 1 << (bits - 1)
        for signed, bottom, top in ((True, -half, half - 1), (False, 0, 2 * half - 1)):
            if hi == top and lo in (bottom, bottom + 1):
                return bits, signed, lo != bottom
    if np.isinf(lo) or np.isinf(hi):
        message = "the codes are not clipped"
    else:
        message = f"the codes {lo:.0f} to {hi:.0f} are not the range of 2 to 8 bits"
    raise Refused("range", message, "clip to -2**(bits-1)…2**(bits-1)-1 or 0…2**bits-1")


def _check_difference(events: list[Event], last: Event, lo: float, hi: float) -> None:
    """code - zero point is within ±(hi - lo): the integers it is held in must have room."""
    held = [last.dtype, *(e.dtype for e in events[events.index(last) :] if e.kind == "cast")]
    for dtype in filter(is_integer, held):
        info = np.iinfo(dtype)
        if info.min > lo - hi or info.max < hi - lo:
            message = f"the difference of code and zero point is computed in {dtype}, and may wrap"
            raise Refused("difference-wraps", message, "subtract in int32 or float32")

"""How activations are quantized: the range of codes, the scale of a part, the words of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tvm import tirx

from .packed_layout import PackedLayout

BYTES_PER_WORD, CODES_PER_WORD = 4, 8
"""INT8 codes of a word, and packed INT4 codes."""

UNIT = 64
"""Columns whose packed codes share eight words."""

SMALLEST_MAXIMUM = 2.0**-100
"""Parts of smaller magnitudes count as zero: amax / 127 would lose its precision."""

_SCALE_COLUMNS = 128
"""More cost accuracy: of a trained Gemma 3 270M with INT4 weights in groups of 32, one scale for
32, 64, 128, 256 columns or for a row adds 0.05, 0.17, 0.45, 0.71 and 2.8 % to the perplexity."""

_LARGEST = {"int8": 127, "int4": 7}
_MANTISSA, _EXPONENT = 0x007FFFFF, 0x7F800000


@dataclass(frozen=True)
class ActivationFormat:
    """Codes -largest…largest, and what stands for them in memory.

    Attributes
    ----------
    largest : int
        127 or 7.
    power_of_two : bool
        Scales are the smallest power of two that is no less than amax / largest.
    packed : bool
        Two codes share a byte, see `int8_matmul`; for codes of 4 bits only.
    """

    largest: int = 127
    power_of_two: bool = False
    packed: bool = False

    @staticmethod
    def of(layout: PackedLayout) -> ActivationFormat:
        """That of the activations which meet a packed weight."""
        spec = layout.spec
        return ActivationFormat(
            largest=_LARGEST.get(spec.activation or "int8", 127),
            power_of_two=spec.activation_scale == "power-of-two",
            packed=spec.activation == "int4" and layout.order == "fragments",
        )

    @staticmethod
    def from_annotations(annotations: Mapping[str, Any]) -> ActivationFormat:
        """The inverse of `annotations`."""
        largest, *flags = (int(annotations[name]) for name in ActivationFormat().annotations)
        return ActivationFormat(largest, *map(bool, flags))

    @property
    def annotations(self) -> dict[str, int]:
        """Of the block that quantizes."""
        return {f"activation.{name}": int(value) for name, value in asdict(self).items()}

    def words(self, padded_k: int) -> int:
        """Of a row; packed ones are those of whole units."""
        if self.packed:
            return -(-padded_k // UNIT) * (UNIT // CODES_PER_WORD)
        return padded_k // BYTES_PER_WORD

    def scale(self, largest: tirx.Expr) -> tirx.Expr:
        """The scale of a part, from the `magnitude` of its largest element."""
        bounded = tirx.max(largest, magnitude(tirx.const(SMALLEST_MAXIMUM, "float32")))
        scale = tirx.reinterpret("float32", bounded) / float(self.largest)
        return power_of_two(scale) if self.power_of_two else scale

    def code(self, x: tirx.Expr, scale: tirx.Expr) -> tirx.Expr:
        """The code of a float32, as an int32."""
        rounded = tirx.nearbyint(x / scale)
        bound = tirx.const(self.largest, "float32")
        return tirx.max(tirx.min(rounded, bound), -bound).astype("int32")


def scale_columns(k: int, group_size: int) -> int:
    """How many columns of activations share a scale: the most that make equal parts of a row."""
    groups = -(-k // group_size)
    most = max(1, _SCALE_COLUMNS // group_size)
    return group_size * max(d for d in range(1, most + 1) if groups % d == 0)


def magnitude(x: tirx.Expr) -> tirx.Expr:
    """The bits of |x|, a float32: integers in the order of the magnitudes, NaN above all."""
    return tirx.reinterpret("int32", x) & 0x7FFFFFFF


def power_of_two(x: tirx.Expr) -> tirx.Expr:
    """The smallest that is no less than x, a positive normal float32; infinity and NaN stay."""
    bits, mantissa = tirx.reinterpret("uint32", x), tirx.const(_MANTISSA, "uint32")
    above = (bits + mantissa) & tirx.const(_EXPONENT, "uint32")
    return tirx.reinterpret("float32", tirx.max(above, bits))  # NaN would become 0

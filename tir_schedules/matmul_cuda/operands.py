"""What a CUDA INT4 product reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from ..contraction import Int4Weight
from .tile import UNIT, Stage, Tile


@dataclass(frozen=True)
class Operands:
    """X (m, k), whose rows follow each other, and the parts of W (n, k) in fragment order.

    INT8 activations come four to an int32, packed ones of INT4 eight, with scales (m, parts) and
    sums (m, groups); `has_int4_products`: tensor cores multiply these. Of X in float32 there are
    three `terms` (m, 3, k), in pairs, see `terms`. `most` is the largest number of rows
    that there can be; None: there is none.
    """

    x: tirx.Buffer
    rows: tirx.Expr
    most: int | None
    weight: Int4Weight
    n: int
    k: int
    x_scale: tirx.Buffer | None = None
    x_sums: tirx.Buffer | None = None
    groups_per_scale: int = 1
    terms: int = 1
    is_packed: bool = False
    has_int4_products: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.x_scale is not None

    @property
    def per_element(self) -> int:
        """Columns in an element of X."""
        if self.is_quantized:
            return 8 if self.is_packed else 4
        return 2 if self.terms > 1 else 1

    @property
    def halves_units(self) -> bool:
        """Whether a product of INT4 on tensor cores has twice the columns of a group."""
        return self.has_int4_products and self.is_grouped and self.weight.group_size < UNIT

    @property
    def unit_bytes(self) -> int:
        """Of the activations of a unit."""
        return UNIT // self.per_element * int(self.x.dtype.itemsize)

    @property
    def channel_tiles(self) -> int:
        return int(self.weight.codes.shape[0])

    @property
    def units(self) -> int:
        return int(self.weight.codes.shape[1])

    @property
    def groups(self) -> int:
        return int(self.weight.scale.shape[1])

    @property
    def is_grouped(self) -> bool:
        return self.groups > 1

    def steps(self, tile: Tile) -> int:
        """Stages of all blocks along k."""
        return -(-self.units // tile.step_units)

    def steps_of_part(self, tile: Tile) -> int:
        """Stages of a block; the last one along k may have fewer."""
        return -(-self.steps(tile) // tile.split)

    def flat(self) -> Operands:
        """With activations as one axis: axes of rows cost divisions."""

        def one_axis(buffer: tirx.Buffer | None) -> tirx.Buffer | None:
            if buffer is None:
                return None
            size = prod(buffer.shape, start=tirx.IntImm("int64", 1))
            flat = T.decl_buffer((size,), str(buffer.dtype), data=buffer.data)
            return IRBuilder.name(f"{buffer.name}_rows", flat)

        x, scale, sums = map(one_axis, (self.x, self.x_scale, self.x_sums))
        return replace(self, x=x, x_scale=scale, x_sums=sums)

    def stage(self, tile: Tile) -> Stage:
        scale = self.weight.scale.dtype.itemsize
        groups = tile.units * UNIT // self.weight.group_size if self.is_grouped else 0
        tokens = tile.block_tokens
        if not tile.wgmma and self.most is not None:
            tokens = min(tokens, self.most)
        zeros = self.is_grouped and self.weight.zero_point is not None
        return Stage(
            tile=tile,
            tokens=tokens,
            unit_bytes=self.unit_bytes,
            groups=groups,
            parts=self._parts(groups),
            scale_width=scale,
            has_zeros=zeros,
            is_quantized=self.is_quantized,
            terms=self.terms,
        )

    def _parts(self, groups: int) -> int:
        """Parts of activations that share a scale, among which so many groups of a slice are."""
        together = self.groups_per_scale
        if groups % together and together % groups:
            return (groups - 2) // together + 2
        return -(-groups // together)

"""How a CUDA kernel for products with INT4 weights is cut into blocks, warps and stages."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ..cuda_wgmma import ATOM_BYTES

CHANNELS, TOKENS = 16, 8
"""Output channels and tokens of a product on tensor cores: the weight is its left factor."""

UNIT = 64
"""Columns of a unit: with 16 channels what a warp reads of the weight at once, see `packing`."""

UNIT_BYTES = UNIT * CHANNELS // 2
ZERO_GROUPS, ZERO_BYTES = 4, 32
"""Groups whose zero points share a word, and bytes of these words of a tile of channels."""

LANES = 32
PIECE = 16
"""Bytes that a thread copies at once at most."""


@dataclass(frozen=True)
class Tile:
    """The shape of a block.

    Attributes
    ----------
    channels, tokens : int
        Tiles of 16 output channels and of 8 tokens that a warp computes.
    warps_n, warps_m, warps_k : int
        Warps of a block along channels, along tokens, and along k; these add up what they have in
        shared memory.
    units : int
        Units of 64 columns that a warp takes per stage.
    stages : int
        Stages of shared memory; all but one are on their way while one is multiplied.
    split : int
        Blocks along k; a second kernel adds up what they have.
    wgmma : int
        1: four warps along channels multiply together, as sm_90a can; 0: each one for itself.
    """

    channels: int
    tokens: int
    warps_n: int
    warps_m: int
    warps_k: int
    units: int
    stages: int
    split: int = 1
    wgmma: int = 0

    @property
    def warps(self) -> int:
        return self.warps_n * self.warps_m * self.warps_k

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def channel_tiles(self) -> int:
        """Of a block."""
        return self.channels * self.warps_n

    @property
    def block_channels(self) -> int:
        return CHANNELS * self.channel_tiles

    @property
    def block_tokens(self) -> int:
        return TOKENS * self.tokens * self.warps_m

    @property
    def step_units(self) -> int:
        """Units that a block takes per stage."""
        return self.units * self.warps_k


@dataclass(frozen=True)
class Stage:
    """Where the operands of a stage lie in shared memory, in bytes.

    A slice for each warp along k holds (codes, activations, scales, zero points) and, of quantized
    activations, scales by part and sums by group. Rows of activations are 16 bytes apart from a
    multiple of 32, so that eight of them lie in different banks. For `wgmma` they are cut into
    pieces of 128 bytes, the first ones of all rows before the second ones, and 16 bytes of a piece
    change places by the row, see `cuda_wgmma`.

    Attributes
    ----------
    tokens : int
        Rows of activations that are there; a block may have fewer than its tile.
    unit_bytes : int
        Of the activations of a unit.
    groups : int
        Groups of the weight in a slice, 0 if each channel is one group.
    parts : int
        And parts of quantized activations that share a scale.
    scale_width : int
        Bytes of a scale.
    has_zeros : bool
    is_quantized : bool
    terms : int
        Numbers that an activation is the sum of: a token has as many rows, side by side.
    """

    tile: Tile
    tokens: int
    unit_bytes: int
    groups: int
    parts: int
    scale_width: int
    has_zeros: bool
    is_quantized: bool
    terms: int = 1

    @property
    def pitch(self) -> int:
        """Of rows of activations."""
        return self.tile.units * self.unit_bytes + PIECE * (not self.tile.wgmma)

    @property
    def alignment(self) -> int:
        return ATOM_BYTES if self.tile.wgmma else PIECE

    @property
    def activations(self) -> int:
        return self.tile.channel_tiles * self.tile.units * UNIT_BYTES

    @property
    def scales(self) -> int:
        return self.activations + self.tokens * self.terms * self.pitch

    @property
    def zeros(self) -> int:
        return self.scales + self.tile.channel_tiles * self.groups * CHANNELS * self.scale_width

    @property
    def zero_words(self) -> int:
        """Of zero points, that a lane reads of a slice."""
        return max(1, self.groups // ZERO_GROUPS)

    @property
    def activation_scales(self) -> int:
        words = self.tile.channel_tiles * self.zero_words * self.has_zeros
        return self.zeros + words * ZERO_BYTES

    @property
    def activation_sums(self) -> int:
        return self.activation_scales + self.parts * self.token_pitch * 4 * self.is_quantized

    @property
    def token_pitch(self) -> int:
        """Tokens from one group to the next: lanes read those of a pair."""
        return -(-self.tokens // 2) * 2

    @property
    def pairs_tiles(self) -> bool:
        """Whether what a lane reads of two tiles of tokens lies side by side."""
        return self.tile.tokens % 2 == 0 and self.tokens == self.tile.block_tokens

    def place(self, token: tirx.Expr) -> tirx.Expr:
        """Of a token among the words of a group or part: a lane reads those of two tokens of a tile
        at once, or of two tiles.
        """
        if not self.pairs_tiles:
            return token
        pair, inside = token // (2 * TOKENS), token % (2 * TOKENS)
        return pair * (2 * TOKENS) + inside % TOKENS // 2 * 4 + inside // TOKENS * 2 + inside % 2

    @property
    def slice(self) -> int:
        sums = self.groups * self.token_pitch * 4 * (self.is_quantized and self.has_zeros)
        return -(-(self.activation_sums + sums) // self.alignment) * self.alignment

    @property
    def bytes(self) -> int:
        return self.slice * self.tile.warps_k

    @property
    def copied(self) -> int:
        """Bytes that arrive for a stage: all but what only keeps others in place."""
        tiles, words = self.tile.channel_tiles, self.parts + self.groups * self.has_zeros
        codes = tiles * self.tile.units * UNIT_BYTES
        activations = self.tokens * self.terms * self.tile.units * self.unit_bytes
        scales = tiles * self.groups * CHANNELS * self.scale_width
        zeros = tiles * self.zero_words * ZERO_BYTES * self.has_zeros
        tokens = words * self.token_pitch * 4 * self.is_quantized
        return (codes + activations + scales + zeros + tokens) * self.tile.warps_k

    @property
    def pipeline_bytes(self) -> int:
        return self.bytes * self.tile.stages

    @property
    def sum_pitch(self) -> int:
        """Floats from one token to the next in the sums, which are there at the end.

        Eight channels and four tokens that a warp writes at once lie in different banks.
        """
        return self.tile.block_channels + 4

    @property
    def sum_bytes(self) -> int:
        return 4 * self.tile.warps_k * self.tokens * self.sum_pitch

    @property
    def shared_bytes(self) -> int:
        return max(self.pipeline_bytes, self.sum_bytes)

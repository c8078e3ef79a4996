"""What was measured of one attention."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProjectionRank:
    """Ranks of a projection W (m, n).

    Attributes
    ----------
    name : str
        "q", "k", "v" or "o".
    shape : (m, n)
    rank : int
        Singular values above 2⁻¹¹ of the largest: the rank at float16 tolerance.
    rank_95, rank_99 : int
        How many hold 95 % and 99 % of the energy Σσ².
    break_even : float
        m·n / (m + n): factors of fewer columns than that save work.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    rank_95: int
    rank_99: int
    break_even: float


@dataclass(frozen=True)
class Similarity:
    """The most similar pair of heads, and their cosine. No pair: one head."""

    cosine: float
    pair: tuple[int, int] | None


@dataclass(frozen=True)
class Measured:
    """What needs sample inputs.

    Attributes
    ----------
    map_similarity : Similarity
        Of the softmax maps, over all samples.
    contribution_similarity : Similarity
        Of what the heads add to the residual stream, with the output projection.
    importance : tuple of float
        Per query head: ‖what it adds‖ / ‖residual stream after the attention‖ (where none is added,
        the attention's output), which is how far its removal moves that. Heads may cancel, so the
        sum over heads may be more than 1.
    norm_ratio : dict of str to float
        Quantiles ("5%", "50%", "95%") over tokens of ‖attention output‖ / ‖residual before it‖;
        empty where no residual is added.
    dropped : dict of float to (mass, cells)
        Per threshold: the share of the mass of a row that lies in cells below it, and the share of
        visible cells that are kept.
    kept_keys : dict of float to float
        Per ε: the share of visible keys that hold 1 - ε of the mass of their row, on average.
    tokens : int
    """

    map_similarity: Similarity
    contribution_similarity: Similarity
    importance: tuple[float, ...]
    norm_ratio: dict[str, float]
    dropped: dict[float, tuple[float, float]]
    kept_keys: dict[float, float]
    tokens: int


@dataclass(frozen=True)
class AttentionRow:
    """One attention.

    Attributes
    ----------
    heads, kv_heads, head_dim, value_dim : int
    kv_bytes : dict of str to float
        Bytes of keys and values per token of context, scales counted: "float16"; "int8/32", 8.5
        bits; "int4/32", 4.5 bits.
    reason : str
        Why weights could not be told apart by head; empty where they could.
    ranks : list of ProjectionRank
    weight_similarity : Similarity or None
        Of W_o·W_v of the heads: what they add for equal maps.
    measured : Measured or None
    """

    function: str
    binding: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    kv_bytes: dict[str, float]
    reason: str = ""
    ranks: list[ProjectionRank] = field(default_factory=list)
    weight_similarity: Similarity | None = None
    measured: Measured | None = None

"""What the weights of one attention say of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from .attention_projections import AttentionWeights, HeadTrace
from .plan import HeadFacts, Part, heads_of
from .selection import VIEW
from .symmetries import ValueForm, is_finite, kind_of, map_keys, value_forms
from .weight_edits import WeightEdits, unit_roundoff


@dataclass(frozen=True)
class HeadWeights:
    """The weights of one attention by head.

    Attributes
    ----------
    q : leaves of each query head, (rows, n) each
    k, v : leaves of each key/value head
    o : (H, D_v, N)
        What each head's result is multiplied by.
    """

    q: list[list[np.ndarray]]
    k: list[list[np.ndarray]]
    v: list[list[np.ndarray]]
    o: np.ndarray

    def is_finite(self, head: int) -> bool:
        """Of q, k and v, by which NaN and infinity get into what a query head adds."""
        group = head // (len(self.q) // len(self.v))
        return is_finite([*self.q[head], *self.k[group], *self.v[group]])

    @staticmethod
    def of(site: AttentionWeights, edits: WeightEdits) -> HeadWeights:
        [leaf] = site.o.leaves
        channels = np.moveaxis(edits.array(leaf.source), leaf.selection.axis, 0)
        blocks = channels.reshape(site.num_heads, site.value_dim, -1)
        counts = (site.num_heads, site.num_kv_heads, site.num_kv_heads)
        q, k, v = (
            _leaves(trace, count, edits)
            for trace, count in zip((site.q, site.k, site.v), counts, strict=True)
        )
        return HeadWeights(q, k, v, blocks[np.argsort(site.order)])


def _leaves(trace: HeadTrace, count: int, edits: WeightEdits) -> list[list[np.ndarray]]:
    arrays = [edits.array(leaf.source) for leaf in trace.leaves]
    pairs = list(zip(trace.leaves, arrays, strict=True))
    return [[leaf.of_head(array, head) for leaf, array in pairs] for head in range(count)]


@dataclass(frozen=True)
class FoundHeads:
    """Facts for a plan, and what it takes to move the rows of output projections.

    `zero` lists query heads whose output slice is zero; `constant` holds, per key/value head,
    the value that it has at every position, or None. `needed` are heads that would be dead but
    for the NaN that they may add to every output.
    """

    zero: list[int]
    needed: list[int]
    constant: list[np.ndarray | None]
    forms: list[ValueForm]
    facts: HeadFacts


def find_heads(
    site: AttentionWeights, weights: HeadWeights, rules: frozenset[str], rows_see: bool
) -> FoundHeads:
    """`rows_see`: no row of the attention is empty, so softmax rows sum to 1."""
    heads, groups = site.num_heads, site.num_kv_heads
    ratio = heads // groups
    zero = [h for h in range(heads) if not weights.o[h].any()] if "zero-heads" in rules else []
    constant: list[np.ndarray | None] = [None] * groups
    if "constant-values" in rules and rows_see:
        constant = [_constant(v, site.v) for v in weights.v]
    dead = [h in zero or constant[h // ratio] is not None for h in range(heads)]
    needed = _needed(site, weights, [h for h in range(heads) if dead[h]], rows_see)
    constant = [None if g in {h // ratio for h in needed} else c for g, c in enumerate(constant)]
    zero = [h for h in zero if h not in needed]
    dead = [h in zero or constant[h // ratio] is not None for h in range(heads)]
    maps: list = list(range(heads))
    forms = [ValueForm(b"%d" % g, np.arange(site.value_dim), np.ones(site.value_dim)) for g in maps]
    forms = forms[:groups]
    if "equal-heads" in rules and has_one_mask(site.call):
        keys = [weights.k[h // ratio] for h in range(heads)]
        maps = map_keys(weights.q, keys, kind_of(site.q, site.k))
        forms = value_forms(weights.v, site.v.kind)
    return FoundHeads(zero, needed, constant, forms, HeadFacts(dead, maps, [f.key for f in forms]))


def _needed(
    site: AttentionWeights, weights: HeadWeights, heads: list[int], rows_see: bool
) -> list[int]:
    """Those of `heads` by which NaN may get into the output, where no other head brings it."""
    same_rows = rows_see or has_one_mask(site.call) or site.call.attrs["empty_row"] != "nan"
    return [head for head in heads if not (same_rows and weights.is_finite(head))]


def _constant(leaves: list[np.ndarray], trace: HeadTrace) -> np.ndarray | None:
    """(D_v,): the bias of a head of values whose weights are zero."""
    if trace.kind != VIEW or not trace.products or len({len(leaf) for leaf in leaves}) > 1:
        return None
    is_bias = [leaf.source.ty.ndim == 1 for leaf in trace.leaves]
    biases = [leaf[:, 0] for leaf, is_one in zip(leaves, is_bias, strict=True) if is_one]
    matrices = [leaf for leaf, is_one in zip(leaves, is_bias, strict=True) if not is_one]
    if len(matrices) != len(trace.products) or any(leaf.any() for leaf in matrices):
        return None  # a vector that is multiplied by the input is no bias
    total = np.sum([bias.astype("float64") for bias in biases], axis=0) + np.zeros(len(leaves[0]))
    return total if np.isfinite(total).all() else None


def has_one_mask(call: relax.Call) -> bool:
    """All heads see the same keys with the same bias."""
    if len(call.args) < 4 or call.args[3].ty.ndim < 3:
        return True
    bias = call.args[3].ty
    return tvm.sym.Analyzer().can_prove_equal(bias.shape[bias.ndim - 3], 1)


def output_rows(part: Part, weights: HeadWeights, forms: list[ValueForm]) -> np.ndarray:
    """float64 (channels, N) rows of the output projection for the heads of `part`, in its order.

    Rows of equal heads are added, in the basis of the values that are kept.
    """
    ratio = len(weights.q) // len(weights.v)
    blocks = []
    for alike in part.classes:
        for place in range(len(alike[0].heads)):
            for group in alike:
                kept = forms[group.index]
                total = np.zeros(weights.o.shape[1:])
                for head in group.heads[place]:
                    own = forms[head // ratio]
                    rows = weights.o[head].astype("float64")[own.order]
                    rows = rows * own.scale[own.order, None] / kept.scale[kept.order, None]
                    total[kept.order] += rows
                blocks.append(total)
    return np.concatenate(blocks)


def rounding(rows: np.ndarray, dtype: np.dtype) -> float:
    """The largest error of float64 `rows` stored in `dtype`, relative to the largest of its row."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(rows - rows.astype(dtype).astype("float64")).max(-1)
    largest = np.abs(rows).max(-1)
    return float(np.max(error / np.where(largest == 0, 1.0, largest)))


def storing_fault(arrays: Sequence[np.ndarray], dtype: np.dtype) -> str:
    """Why `dtype` can't hold what heads that stay are multiplied by, or what is added; or empty."""
    error, unit = max(rounding(array, dtype) for array in arrays), unit_roundoff(dtype)
    if error <= unit:
        return ""
    off = f"off by {error:.1e}, over {unit:.1e}"
    return f"new rows of the output projection in {dtype} would be {off}"


def folded_constant(
    found: FoundHeads, parts: list[Part], weights: HeadWeights
) -> np.ndarray | None:
    """float64 (N,): what heads of constant values that are not kept add to the output."""
    groups = [group.index for part in parts for alike in part.classes for group in alike]
    total = np.zeros(weights.o.shape[2])
    for index, value in enumerate(found.constant):
        if value is not None and index not in groups:
            for head in heads_of(index, found.facts):
                total += value @ weights.o[head].astype("float64")
    return total if total.any() else None

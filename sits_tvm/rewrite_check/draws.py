"""Arguments for a region: seeded, and those on which attention goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Op

from relax_passes._adjoint import bindings_of, used_vars
from tir_schedules.tir_nodes import substitute

from .regions import Region

BATCHES = (1, 2, 9)
LENGTHS = (7, 1, 12, 5)
_EXTREME_SCORE = 200.0


@dataclass(frozen=True)
class Draw:
    """Values of `Region.dims` and arrays for `Region.inputs`."""

    name: str
    dims: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]


def draws(region: Region) -> Iterator[Draw]:
    """For batches of 1, 2 and 9 (where it is symbolic), and lengths that differ: normal values,
    and where the region holds attention: scores of -200 and 200, keys hidden from every query, NaN
    in a hidden key, other values in the last key."""
    attention = _Attention.of(region)
    for number, batch in enumerate(BATCHES if region.dims else BATCHES[:1]):
        dims = _dims(region, attention, batch, number)
        values = dict(zip(region.dims, dims, strict=True))
        rng = np.random.default_rng(number)
        arrays = tuple(_normal(rng, var, values) for var in region.inputs)
        shown = " ".join(f"{dim.name}={value}" for dim, value in values.items())
        yield Draw(f"seed {number} {shown}".strip(), dims, arrays)
        for name, changed in attention.variants(arrays, rng) if attention else ():
            yield Draw(f"{name} {shown}".strip(), dims, changed)


@dataclass(frozen=True)
class _Attention:
    """The first attention call of a region; which inputs each of its arguments comes from."""

    call: relax.Call
    roles: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, region: Region) -> _Attention | None:
        for mod in (region.after, region.before):
            func = mod["main"]
            values = {b.var: b.value for b in bindings_of(func)}
            for value in values.values():
                if isinstance(value, relax.Call) and value.op == Op.get("relax.sits.attention"):
                    inputs = list(func.params[1:])
                    roles = [frozenset(_reached(values, inputs, arg)) for arg in value.args]
                    return cls(value, tuple(roles))
        return None

    def variants(
        self, arrays: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
        q, k = self.roles[:2]
        level = self._level()
        for sign in (1, -1) if not q & k else (1,):
            values = {i: level for i in q} | {i: sign * level for i in k}
            changed = {i: _near(rng, arrays[i], value) for i, value in values.items()}
            yield f"scores {sign * _EXTREME_SCORE:+.0f}", _with(arrays, changed)
        for i in self.roles[3] if len(self.roles) > 3 else ():
            yield "empty row", _with(arrays, {i: _hidden(arrays[i], slice(0, 1))})
        yield from self._key_variants(arrays)

    def _level(self) -> float:
        """Of every element of q and k, for the extreme score."""
        width, scale = self.call.args[0].ty.shape[3], abs(float(self.call.attrs["scale"]))
        return float((_EXTREME_SCORE / max(scale * int(width), 1e-9)) ** 0.5)

    def _key_variants(
        self, arrays: tuple[np.ndarray, ...]
    ) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
        """The last key, which all queries but the last of a causal mask, or all, do not see."""
        keys = [i for i in self.roles[1] if self._is_argument(arrays[i])]
        if len(self.roles[1]) != 1 or not keys or arrays[keys[0]].shape[2] == 0:
            return
        masks = self.roles[3] if len(self.roles) > 3 else frozenset()
        hidden = {i: _hidden(arrays[i], (Ellipsis, slice(-1, None))) for i in masks}
        for name, factor in {"NaN in the last key": np.nan, "another last key": -3.0}.items():
            key = arrays[keys[0]].copy()
            key[:, :, -1] *= np.asarray(factor, key.dtype)
            yield name, _with(arrays, {**hidden, keys[0]: key})

    def _is_argument(self, array: np.ndarray) -> bool:
        """Whether an input of k has its shape (B, G, Sk, D), as far as it is static."""
        shape = list(self.call.args[1].ty.shape)
        pairs = zip(shape, array.shape, strict=False)
        same = all(int(d) == n for d, n in pairs if isinstance(d, tirx.IntImm))
        return len(shape) == array.ndim and same


def _reached(
    values: dict[relax.Var, relax.Expr], inputs: list[relax.Var], arg: relax.Expr
) -> set[int]:
    if not isinstance(arg, relax.Var):
        return set()
    if arg in inputs:
        return {inputs.index(arg)}
    read = used_vars(values[arg]) if arg in values else ()
    return {i for var in read for i in _reached(values, inputs, var)}


def _dims(region: Region, attention: _Attention | None, batch: int, number: int) -> tuple[int, ...]:
    sizes = iter(np.roll(LENGTHS, -number).tolist() * len(region.dims))
    first = attention.call.args[0].ty.shape[0] if attention else None
    return tuple(batch if dim.same_as(first) else next(sizes) for dim in region.dims)


def _normal(rng: np.random.Generator, var: relax.Var, dims: dict[tirx.Var, int]) -> np.ndarray:
    """Normal numbers, bools of which 0.7 are True, positions along the last axis for integers."""
    shape, dtype = shape_with(var.ty.shape, dims), str(var.ty.dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.7
    if "float" in dtype:
        return rng.standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))
    return (
        np.broadcast_to(np.arange(shape[-1] if shape else 1), shape or (1,))
        .reshape(shape)
        .astype(dtype)
    )


def shape_with(shape: relax.ShapeExpr, dims: dict[tirx.Var, int]) -> tuple[int, ...]:
    """The extents for these values of the symbolic dimensions."""
    analyzer = tvm.sym.Analyzer()
    values = {dim: tirx.IntImm("int64", value) for dim, value in dims.items()}
    return tuple(int(analyzer.simplify(substitute(extent, values))) for extent in shape)


def _near(rng: np.random.Generator, like: np.ndarray, value: float) -> np.ndarray:
    return (value * (1 + 0.05 * rng.standard_normal(like.shape))).astype(like.dtype)


def _hidden(mask: np.ndarray, where: Any) -> np.ndarray:
    """A mask that hides what is at `where`; in floats, by the lowest number."""
    out = mask.copy()
    out[where] = False if mask.dtype == bool else ml_dtypes.finfo(mask.dtype).min
    return out


def _with(arrays: tuple[np.ndarray, ...], changed: dict[int, np.ndarray]) -> tuple[np.ndarray, ...]:
    return tuple(changed.get(i, array) for i, array in enumerate(arrays))

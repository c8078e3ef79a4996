"""A weight of which 4-bit codes are given: by a file, or by a module that unpacks them itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_SYMMETRIC_ZERO = 8


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """A weight W[:, columns] = (codes - zero_point) * scale, (n, k), in groups along k.

    Attributes
    ----------
    codes : (n, k)
        int8 -8…7 where there is no zero point, else uint8 0…15.
    scale : (n, groups)
        float16 or float32, any finite values.
    zero_point : (n, groups) uint8, optional
    group_size : int
        -1: one group.
    columns : (k,) int64, optional
        Of W, in the order of the codes. None: as they are.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    group_size: int
    columns: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        codes: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray,
        group_size: int,
        columns: np.ndarray | None = None,
    ) -> StoredCodes:
        """Of codes and zero points in 0…15: symmetric where every zero point is 8."""
        if not (zero_point == _SYMMETRIC_ZERO).all():
            return cls(codes, scale, zero_point, group_size, columns)
        signed = codes.astype("int8") - np.int8(_SYMMETRIC_ZERO)
        return cls(signed, scale, None, group_size, columns)

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """The arrays by the suffixes of their parameters' names."""
        named = {"": self.codes, ".scale": self.scale, ".zero_point": self.zero_point}
        return {suffix: array for suffix, array in named.items() if array is not None}

    def dequantized(self) -> np.ndarray:
        """W in float32."""
        size, k = self.group_size, self.codes.shape[1]
        wide = [
            np.repeat(p.astype("float32"), k if size == -1 else size, axis=1)[:, :k]
            for p in (self.scale, self.zero_point)
            if p is not None
        ]
        codes = self.codes.astype("float32")
        values = (codes - wide[1] if wide[1:] else codes) * wide[0]
        return values if self.columns is None else values[:, np.argsort(self.columns)]

"""Rows added at indices: what undoes a lookup in a table."""

from __future__ import annotations

from functools import lru_cache

from tvm import tirx
from tvm.script import tirx as T


@lru_cache(maxsize=64)
def scatter_rows(dtype: str, index_dtype: str, mode: str) -> tirx.PrimFunc:
    """rows (p, m, d), indices (m,) -> table (p, n, d): table[:, indices[j], :] += rows[:, j, :].

    Parameters
    ----------
    dtype : str
        Of rows and table; sums are as exact as it is.
    index_dtype : str
    mode : str
        An index outside 0…n-1 means, as for `R.take`: "clip" the nearest inside, "wrap" modulo n;
        in any other mode the row is dropped.
    """

    @T.prim_func(s_tir=True)
    def scatter_rows(rows: T.handle, indices: T.handle, table: T.handle):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8})
        p, m, n, d = T.int64(), T.int64(), T.int64(), T.int64()
        Rows = T.match_buffer(rows, (p, m, d), dtype)
        Ids = T.match_buffer(indices, (m,), index_dtype)
        Y = T.match_buffer(table, (p, n, d), dtype)
        for i, j, k in T.grid(p, n, d):
            with T.sblock("zero"):
                vi, vj, vk = T.axis.remap("SSS", [i, j, k])
                T.reads()
                T.writes(Y[vi, vj, vk])
                Y[vi, vj, vk] = T.Cast(dtype, 0)
        for i, j, k in T.grid(p, m, d):
            with T.sblock("add"):
                vi, vj, vk = T.axis.remap("SRS", [i, j, k])
                T.reads(Rows[vi, vj, vk], Ids[vj], Y[vi, 0:n, vk])
                T.writes(Y[vi, 0:n, vk])
                row: T.let[T.int64] = _row(Ids[vj], n, mode)
                if row >= T.int64(0) and row < n:
                    Y[vi, row, vk] = Y[vi, row, vk] + Rows[vi, vj, vk]

    return scatter_rows


def _row(index, n, mode):  # type: ignore[no-untyped-def]
    index = T.Cast("int64", index)
    if mode == "wrap":
        return tirx.floormod(index, n)
    if mode == "clip":
        return T.max(T.min(index, n - T.int64(1)), T.int64(0))
    return index

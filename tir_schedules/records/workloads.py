"""What the tuning database knows kernels by: all of a kernel but for the number of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class MatmulWorkload:
    """A product with an INT4 weight W[n, k].

    `group_size` is -1 where one group spans k; `dtype` is that of the activations.
    """

    family: str
    n: int
    k: int
    group_size: int
    symmetric: bool
    scale_dtype: str
    dtype: str

    def __str__(self) -> str:
        group = "per channel" if self.group_size == -1 else f"g{self.group_size}"
        kind = "" if self.symmetric else " asymmetric"
        return f"{self.family} {self.n}x{self.k} {group}{kind} {self.dtype}"


@dataclass(frozen=True)
class AttentionWorkload:
    """Attention of any batch and number of keys; rows are queries.

    `window` and `softcap` are 0 for none; `bias` is its dtype, "" for none; it is `by_row` where
    heads or queries have biases of their own.
    """

    family: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool
    window: int
    softcap: float
    bias: str
    by_row: bool

    def __str__(self) -> str:
        heads, width = f"{self.num_heads}/{self.num_kv_heads}", f"{self.head_dim}"
        if self.value_dim != self.head_dim:
            width += f"/{self.value_dim}"
        kinds = {
            "causal": self.causal,
            f"window {self.window}": self.window,
            "softcap": self.softcap,
            f"{self.bias} bias{' by row' if self.by_row else ''}": self.bias,
        }
        return " ".join(
            [self.family, f"{heads}x{width}", self.dtype, *(k for k, v in kinds.items() if v)]
        )


Workload: TypeAlias = MatmulWorkload | AttentionWorkload

MATMULS = ("int4_matmul", "int8_matmul")
"""Families of products with activations of floats and INT8; each has a file in the database."""

ATTENTION = "attention"
WORKLOADS: dict[str, type[Workload]] = {
    **dict.fromkeys(MATMULS, MatmulWorkload),
    ATTENTION: AttentionWorkload,
}
"""By family."""

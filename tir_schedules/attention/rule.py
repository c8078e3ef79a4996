"""`relax.sits.attention` as one fused kernel.

Every kernel computes, for query head h and key/value head h // group, in float32::

    s[i, j] = cap(scale * q[i] . k[j]) + bias[i, j]     over the keys j that query i sees
    out[i]  = sum over j of softmax(s[i])[j] * v[j]

tile by tile of keys with a running maximum and sum (Milakov and Gimelshein 2018, arXiv 1805.02867;
Dao et al. 2022, arXiv 2205.14135), so that no matrix of Sq x Sk scores exists.
"""

from __future__ import annotations

from tvm import relax, s_tir, tirx
from tvm.target import Target

from ..records.space import Spaces, TunableRule, chosen, search_space
from ..records.workloads import ATTENTION, AttentionWorkload
from .cpu import cpu_attention, cpu_spaces
from .cuda import cuda_attention, cuda_refusal
from .plain import plain_attention
from .spec import attention_spec, spec_of
from .workload import excerpt, inputs, prim_func, workload_of


def attention_kernel(call: relax.Call, target: Target) -> tirx.PrimFunc | str:
    """The function of a call of `relax.sits.attention`, or why it has no kernel.

    Parameters
    ----------
    call : relax.Call
        With its type.
    target : Target

    Returns
    -------
    PrimFunc or str
        Of `AttentionSpec.arguments`; the shapes of these bind symbolic extents. It has no schedule,
        for which `Attention` is, and is opaque to fusion.
    """
    spec = attention_spec(call)
    if isinstance(spec, str):
        return spec
    refusals = {"llvm": lambda *_: None, "cuda": cuda_refusal}
    if target.kind.name not in refusals:
        return f"there is no kernel for {target.kind.name}"
    refusal = refusals[target.kind.name](spec, target)
    return plain_attention(spec) if refusal is None else refusal


class Attention(TunableRule[AttentionWorkload]):
    """Replace what `attention_kernel` made by the kernel of the target."""

    families = (ATTENTION,)

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The kernel, or its search space; None if the function is no attention."""
        spec = spec_of(func)
        if spec is None:
            return None
        if target.kind.name == "cuda":
            return s_tir.Schedule(cuda_attention(func, spec))
        spaces = cpu_spaces(spec, target)
        if tunable:
            return search_space(func, spaces)
        return s_tir.Schedule(cpu_attention(func, spec, spaces, chosen(func, spaces)))

    def workload(self, func: tirx.PrimFunc, target: Target) -> AttentionWorkload | None:
        spec = spec_of(func) if target.kind.name == "llvm" else None
        return None if spec is None else workload_of(spec)

    def spaces(self, func: tirx.PrimFunc, target: Target) -> Spaces:
        spec = spec_of(func)
        return {} if spec is None else cpu_spaces(spec, target)

    prim_func = staticmethod(prim_func)
    inputs = staticmethod(inputs)
    excerpt = staticmethod(excerpt)

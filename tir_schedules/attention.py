"""`relax.sits.attention` as one fused kernel.

Every kernel computes, for query head h and key/value head h // group, in float32::

    s[i, j] = cap(scale * q[i] . k[j]) + bias[i, j]     over the keys j that query i sees
    out[i]  = sum over j of softmax(s[i])[j] * v[j]

tile by tile of keys with a running maximum and sum (Milakov and Gimelshein 2018, arXiv 1805.02867;
Dao et al. 2022, arXiv 2205.14135), so that no matrix of Sq x Sk scores exists.
"""

from __future__ import annotations

from tvm import relax, tirx
from tvm.target import Target

from .attention_cpu import cpu_attention
from .attention_cuda import cuda_attention
from .attention_spec import AttentionSpec, attention_spec

__all__ = ["AttentionSpec", "attention_kernel"]

# TOpPattern kOpaque: FuseOps leaves calls of such a function alone.
_OPAQUE = 8


def attention_kernel(call: relax.Call, target: Target) -> tirx.PrimFunc | str:
    """The scheduled kernel of a call of `relax.sits.attention`, or why there is none.

    Parameters
    ----------
    call : relax.Call
        With its type.
    target : Target

    Returns
    -------
    PrimFunc or str
        Of `AttentionSpec.arguments`; the shapes of these bind symbolic extents. It is marked
        ``tirx.is_scheduled``, names its ``sits.rule``, and is opaque to fusion.
    """
    spec = attention_spec(call)
    if isinstance(spec, str):
        return spec
    kernel = _kernel(spec, target)
    if isinstance(kernel, str):
        return kernel
    attrs = {"tirx.is_scheduled": True, "sits.rule": "Attention", "op_pattern": _OPAQUE}
    return kernel.with_attr(attrs)


def _kernel(spec: AttentionSpec, target: Target) -> tirx.PrimFunc | str:
    kernels = {"llvm": cpu_attention, "cuda": cuda_attention}
    if target.kind.name not in kernels:
        return f"there is no kernel for {target.kind.name}"
    return kernels[target.kind.name](spec, target)

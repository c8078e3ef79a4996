"""Arrays of TVM's dtypes as float64 tensors, and their rounding to those dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax


def to_torch(array: Any) -> Any:
    """A float array as float64, an integer one as int64, bool as bool."""
    import torch

    array = np.asarray(array)
    if array.dtype == np.bool_:
        return torch.from_numpy(np.array(array))
    kind = "int64" if array.dtype.kind in "iu" else "float64"  # ml_dtypes' floats are of kind V
    return torch.from_numpy(np.array(array.astype(kind)))


def as_point(value: Any, expr: relax.Expr) -> Any:
    """A number of the dtype that the compiled function holds; a float16 one widened again."""
    import torch

    if not isinstance(expr.ty, relax.TensorType) or isinstance(value, int | float | list):
        return value
    tensor = value.detach() if isinstance(value, torch.Tensor) else to_torch(value)
    return to_dtype(tensor, str(expr.ty.dtype)) if tensor.dtype == torch.float64 else tensor


def to_dtype(tensor: Any, dtype: str) -> Any:
    import torch

    narrow = getattr(torch, dtype, None) if "float" in dtype else None
    return tensor if narrow is None else tensor.to(narrow).to(torch.float64)


def perturbed(value: Any, ty: tvm.ir.Type, random: Any) -> Any:
    """`value`, and the gradient that comes back, off by up to half a unit of the dtype of `ty`.

    `random` is a torch.Generator. Integers stay as they are.
    """
    import torch

    if not isinstance(ty, relax.TensorType) or value.dtype != torch.float64:
        return value
    dtype = getattr(torch, str(ty.dtype), None)
    if dtype is None or not dtype.is_floating_point:
        return value
    return _perturbation().apply(value, torch.finfo(dtype).eps, random)


def _perturbation() -> Any:
    import torch

    def off(x: Any, eps: float, random: Any) -> Any:
        return x * (1 + eps * (torch.rand(x.shape, generator=random, dtype=x.dtype) - 0.5))

    class Perturbation(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, eps: float, random: Any) -> Any:
            ctx.how = eps, random
            return off(x, eps, random)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return off(gradient, *ctx.how), None, None

    return Perturbation

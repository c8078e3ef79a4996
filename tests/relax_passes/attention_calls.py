"""Modules of one call of R.sits.attention."""

from small_modules import one_function
from tvm import relax

from relax_passes.op import attention


def tensor(*shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


def module(*types, **attributes):
    """main(q, k, v[, bias]) = attention(q, k, v[, bias])."""
    return one_function(lambda bb, *args: attention(*args, **attributes), *types)

"""Build and run quantization ops for tests: NumPy in, NumPy out."""

from __future__ import annotations

import functools

import numpy as np
import tvm
from tvm import relax

from relax_passes.op import fake_quantize
from relax_passes.op._fake_quantize_gradient import fake_quantize_grad
from sits_tvm import build

TARGET = "llvm -mcpu=native -num-cores=2"


def variables(*arrays, symbolic=False):
    """A variable for each array; the first axis of those of the highest rank may be symbolic."""
    rows, rank = tvm.tirx.Var("n", "int64"), max(array.ndim for array in arrays)
    made = []
    for i, array in enumerate(arrays):
        shape = [rows, *array.shape[1:]] if symbolic and array.ndim == rank else array.shape
        made.append(relax.Var(f"a{i}", relax.TensorType(list(shape), str(array.dtype))))
    return made


def module(call, args):
    """A module whose `main` returns call(*args)."""
    bb = relax.BlockBuilder()
    with bb.function("main", args):
        with bb.dataflow():
            out = bb.emit_output(call(*args))
        bb.emit_func_output(out)
    return bb.get()


def run(executable, *arrays, function="main"):
    """The result as an array, or as a tuple of them."""
    vm = relax.VirtualMachine(executable, tvm.cpu())
    result = vm[function](*(tvm.runtime.tensor(np.array(a, order="C")) for a in arrays))
    return to_numpy(result)


def to_numpy(result):
    return result.numpy() if hasattr(result, "numpy") else tuple(to_numpy(r) for r in result)


def evaluate(call, *arrays, symbolic=False, target=TARGET):
    """call(*arrays) through `sits_tvm.build`."""
    return run(build(module(call, variables(*arrays, symbolic=symbolic)), target), *arrays)


def both(gy, x, *parameters, symbolic=False, **form):
    """The value, and (dx, ds[, dz]), from one build."""
    attrs = attributes(x, *parameters, **form)

    def call(gy, *args):
        return relax.Tuple([fake_quantize(*args, **form), fake_quantize_grad(gy, *args, **attrs)])

    return evaluate(call, gy, x, *parameters, symbolic=symbolic)


def forward(x, *parameters, **form):
    return evaluate(functools.partial(fake_quantize, **form), x, *parameters)


def backward(gy, x, *parameters, **form):
    """(dx, ds[, dz])."""
    attrs = attributes(x, *parameters, **form)
    return evaluate(functools.partial(fake_quantize_grad, **attrs), gy, x, *parameters)


def attributes(*arrays, **form):
    """All attributes of a call of `fake_quantize`."""
    return dict(fake_quantize(*variables(*arrays), **form).attrs.items())

"""Losses for tests of differentiate, its result run, and its errors."""

import numpy as np
import pytest
import tvm
from small_modules import one_function
from tvm import relax

from sits_tvm import SitsError, build, differentiate

VECTOR = relax.TensorType([4], "float32")
X = np.array([1.0, -2.0, 3.0, 0.5], "float32")


def loss_of(make, *types, num_input=None):
    """main(a0, a1, …) = Σ of what `make` emits."""
    return one_function(
        lambda bb, *xs: relax.op.sum(bb.emit(make(bb, *xs))), *types, num_input=num_input
    )


def run(mod, name, *arrays):
    only = {gv: f for gv, f in mod.functions.items() if gv.name_hint == name}
    vm = relax.VirtualMachine(build(tvm.IRModule(only), "llvm"), tvm.cpu())
    return vm[name](*map(tvm.runtime.tensor, arrays))


def errors_of(mod, *args, **options):
    with pytest.raises(SitsError) as caught:
        differentiate(mod, *args, **options)
    return caught.value.diagnostics

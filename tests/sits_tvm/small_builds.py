"""What tests of sits_tvm.build share: a target, formats, and how to run or to refuse."""

import pytest
import tvm
from tvm import relax

import sits_tvm
from sits_tvm import Config, QuantSpec, SitsError

CPU = "llvm -mcpu=native"
G32 = QuantSpec(group_size=32, symmetric=False)
QUANT = Config(quant=G32)
MATRIX = relax.TensorType((64, 64), "float32")


def codes(diagnostics):
    return [diagnostic.code for diagnostic in diagnostics]


def refused(*args, **options):
    with pytest.raises(SitsError) as raised:
        sits_tvm.build(*args, **options)
    return raised.value.diagnostics


def run(executable, *inputs, function="main"):
    vm = relax.VirtualMachine(executable, tvm.cpu())
    return vm[function](*inputs, *executable.params_for(function)).numpy()

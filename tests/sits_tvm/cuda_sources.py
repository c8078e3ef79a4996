"""CUDA texts and modules for tests of device code, and the mark of those that need nvcc."""

from types import SimpleNamespace

import pytest
from tvm.script import ir as I
from tvm.script import relax as R

from sits_tvm.device_code import find_toolkit

needs_nvcc = pytest.mark.skipif(find_toolkit() is None, reason="pip install 'sits_tvm[cuda]'")


@I.ir_module
class Linear:
    @R.function
    def main(x: R.Tensor(("n", 512), "float16"), w: R.Tensor((1024, 512), "float16")) -> R.Tensor(
        ("n", 1024), "float16"
    ):
        with R.dataflow():
            y = R.nn.softmax(R.matmul(x, R.permute_dims(w)), axis=-1)
            R.output(y)
        return y


def holding(source):
    """What an executable with this CUDA text looks like from outside."""
    cuda = SimpleNamespace(kind="cuda", imports=[], inspect_source=lambda: source)
    return SimpleNamespace(mod=SimpleNamespace(kind="vm", imports=[cuda]))

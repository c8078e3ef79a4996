from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from relax_passes import InlineTupleAccess


@I.ir_module
class NestedResult:
    """TVM's own pipelines fail on it in FuseTIR."""

    @R.function
    def pair(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.multiply(x, x)
            out = (x, (y, x))
            R.output(out)
        return out

    @R.function
    def main(x: R.Tensor((4,), "float32")):
        cls = NestedResult
        with R.dataflow():
            result = cls.pair(x)
            inner = result[1]
            y = inner[0]
            z = R.add(y, y)
            R.output(z)
        return z


def test_same_numbers() -> None:
    ex = sits_tvm.build(NestedResult, "llvm -mcpu=native")
    x = np.arange(4, dtype="float32")
    np.testing.assert_array_equal(relax.VirtualMachine(ex, tvm.cpu())["main"](x).numpy(), 2 * x * x)


def test_leaves_fused_kernels_alone() -> None:
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
    ]

    @I.ir_module
    class Plain:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.exp(R.multiply(x, x))
                R.output(y)
            return y

    fused = tvm.transform.Sequential(passes)(Plain)
    assert len(fused.get_global_vars()) == 4
    assert_structural_equal(InlineTupleAccess()(fused), fused)

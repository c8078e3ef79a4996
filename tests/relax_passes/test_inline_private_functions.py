from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import sits_tvm
from relax_passes import InlinePrivateFunctions


@I.ir_module
class Nested:
    """Shapes that the callees compute with, and a tuple on the way."""

    @R.function(private=True)
    def flatten(x: R.Tensor(("n", "m"), "float32")):
        n = T.int64()
        m = T.int64()
        with R.dataflow():
            y = R.reshape(x, R.shape([n * m]))
            z = R.add(y, R.ones(R.shape([n * m]), "float32"))
            out = (y, z)
            R.output(out)
        return out

    @R.function(private=True)
    def both(x: R.Tensor(("k", "m"), "float32")):
        cls = Nested
        with R.dataflow():
            pair = cls.flatten(x)
            y = R.multiply(pair[0], pair[1])
            R.output(y)
        return y

    @R.function
    def main(x: R.Tensor(("s", 4), "float32"), w: R.Tensor((4, 3), "float32")):
        cls = Nested
        with R.dataflow():
            y = cls.both(x)
            z = cls.both(R.matmul(x, w))
            R.output(y, z)
        return (y, z)


def test_same_numbers() -> None:
    digest = tvm_ffi.structural_hash(Nested)
    ex = sits_tvm.build(Nested, "llvm -mcpu=native")
    assert tvm_ffi.structural_hash(Nested) == digest
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(s).astype("float32") for s in [(5, 4), (4, 3)])
    y, z = relax.VirtualMachine(ex, tvm.cpu())["main"](x, w)
    for got, plain in ((y, x), (z, x @ w)):
        flat = plain.reshape(-1)
        np.testing.assert_allclose(got.numpy(), flat * (flat + 1), rtol=1e-5, atol=1e-5)


def test_private_functions_are_gone() -> None:
    names = {gvar.name_hint for gvar in InlinePrivateFunctions()(Nested).get_global_vars()}
    assert names == {"main"}


def test_leaves_public_functions_and_what_calls_itself_alone() -> None:
    @I.ir_module
    class Before:
        @R.function(private=True)
        def again(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            cls = Before
            y: R.Tensor((4,), "float32") = cls.again(x)
            return y

        @R.function
        def public(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.exp(x)
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            cls = Before
            with R.dataflow():
                y = cls.public(x)
                R.output(y)
            return y

    after = InlinePrivateFunctions()(Before)
    assert {gvar.name_hint for gvar in after.get_global_vars()} == {"public", "main"}
    for name in ("public", "main"):
        assert_structural_equal(after[name], Before[name])


@pytest.mark.parametrize("branch", [True, False])
def test_a_call_in_a_branch(branch: bool) -> None:
    @I.ir_module
    class Branch:
        @R.function(private=True)
        def double(x: R.Tensor(("n",), "float32")):
            with R.dataflow():
                y = R.add(x, x)
                R.output(y)
            return y

        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")) -> R.Tensor(
            (4,), "float32"
        ):
            cls = Branch
            if c:
                a = cls.double(x)
                out = R.exp(a)
            else:
                out = cls.double(x)
            return out

    ex = sits_tvm.build(Branch, "llvm -mcpu=native")
    x = np.arange(4, dtype="float32")
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](np.array(branch), x).numpy()
    np.testing.assert_allclose(got, np.exp(2 * x) if branch else 2 * x, rtol=1e-5)

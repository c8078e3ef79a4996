"""LowerAttention replaces the op everywhere, touches nothing else, and keeps the numbers."""

import inspect
import textwrap

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import relax_passes.op  # noqa: F401  (registers R.sits.attention)
from relax_passes.lower_attention import LowerAttention


def verify(before, expected):
    digest = tvm_ffi.structural_hash(before)
    after = LowerAttention()(before)
    assert relax.analysis.check_well_formed(after)
    assert_structural_equal(after, expected)
    assert tvm_ffi.structural_hash(before) == digest


def documented(name):
    block = inspect.getdoc(LowerAttention).split(f"{name}::\n")[1].split("\n\nAfter::")[0]
    return tvm.script.from_source(textwrap.dedent(block))


def test_does_what_its_docstring_says():
    verify(documented("Before"), documented("After"))


def test_leaves_other_ops_alone():
    """A module without attention comes back equal, `R.nn.attention` included."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 8, 2, 4), "float32")):
            with R.dataflow():
                a = R.nn.attention(x, x, x)
                y = R.matmul(a, R.permute_dims(a, [0, 1, 3, 2]))
                R.output(y)
            return y

    verify(Before, Before)


@I.ir_module
class _TwoFunctions:
    @R.function
    def main(q: R.Tensor((1, 2, "s", 4), "float32"), k: R.Tensor((1, 1, "t", 4), "float32")):
        with R.dataflow():
            a = R.sits.attention(q, k, k, causal="bottom_right", window=3)
            y = R.sits.attention(a, k, k, softcap=2.0, empty_row="zero", scale=1.0)
            R.output(y)
        return y

    @R.function
    def other(q: R.Tensor((1, 2, 3, 4), "float32"), c: R.Tensor((), "bool")):
        if c:  # noqa: SIM108
            y = R.sits.attention(q, q, q, causal=0)
        else:
            y = R.add(q, q)
        return y


def test_lowers_every_site_of_every_function():
    after = LowerAttention()(_TwoFunctions)
    assert "sits.attention" not in after.script()
    assert relax.analysis.check_well_formed(after)


def test_same_numbers_as_legalize_ops():
    """The pass and FLegalize are one definition; this one keeps the matmuls as Relax ops."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(s).astype("float32") for s in ((1, 2, 3, 4), (1, 1, 5, 4)))
    results = []
    for mod in (_TwoFunctions, LowerAttention()(_TwoFunctions)):
        vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
        results.append(vm["main"](q, k).numpy())
    np.testing.assert_array_equal(*results)

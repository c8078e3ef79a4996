"""`check_gradient_conservation`: arguments that it refuses, and what to write instead."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from gradient_modules import Network, by_hand, ones, squares
from small_modules import one_function
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

from sits_tvm import SitsError, check_gradient_conservation, differentiate


def test_refuses_arguments_that_do_not_fit():
    mod = differentiate(Network)
    bad = {"up": np.zeros((16, 31), "float32"), "head": np.zeros((6, 16)), "haed": np.zeros(1)}
    with pytest.raises(SitsError) as caught:
        check_gradient_conservation(mod, params=bad)
    assert len(caught.value.diagnostics) == 3
    assert "`up` is float32 (16, 31)" in str(caught.value)
    assert "'haed'" in str(caught.value)
    with pytest.raises(SitsError, match="12 inputs for 9 arguments"):
        check_gradient_conservation(mod, inputs=[np.zeros(1)] * 12)


def test_refuses_a_module_without_an_adjoint():
    with pytest.raises(SitsError, match=r"no-adjoint.*\n.*\n.*sits_tvm.differentiate"):
        check_gradient_conservation(Network)
    with pytest.raises(SitsError, match="expected an IRModule, got a Function"):
        check_gradient_conservation(Network["main"])


def test_asks_for_arguments_of_symbolic_shape():
    @I.ir_module
    class Mod:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 4), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                loss = R.sum(R.matmul(x, w))
                R.output(loss)
            return loss

    mod = differentiate(Mod)
    with pytest.raises(SitsError, match="static shape: x"):
        check_gradient_conservation(mod)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
    assert check_gradient_conservation(mod, inputs=[x], seeds=[0]).ok


def test_says_what_to_install(monkeypatch):
    mod = differentiate(Network)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SitsError, match=r"sits_tvm\[hf\]"):
        check_gradient_conservation(mod)


@pytest.mark.parametrize("options", [{"seeds": []}, {"loss_scales": []}, {"loss_scales": [0.0]}])
def test_refuses_to_compare_nothing(options):
    with pytest.raises(SitsError) as error:
        check_gradient_conservation(by_hand(squares, ones), **options)
    assert error.value.diagnostics[0].code == "check-options"


def test_a_function_that_is_not_defined_at_its_arguments_is_not_called_wrong():
    mod = differentiate(
        one_function(lambda bb, w: O.sum(bb.emit(O.log(w))), relax.TensorType((8,), "float32"))
    )
    with pytest.raises(SitsError) as error:
        check_gradient_conservation(mod, params={"a0": np.zeros(8, "float32") - 1})
    assert error.value.diagnostics[0].code == "loss-not-finite"

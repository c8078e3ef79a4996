"""prepare_qat and convert_qat: what they refuse, all that is wrong at once."""

import numpy as np
import pytest
import qat_training as training
from small_builds import codes
from small_modules import Mlp, mlp_params

from sits_tvm import QuantSpec, SitsError, convert_qat, prepare_qat
from sits_tvm.diagnostics import collect


def broken(params, name, value):
    changed = training.copied(params)
    changed[name][2, 1] = value
    return changed


@pytest.mark.parametrize(
    ("name", "value", "code", "said"),
    [
        ("up.scale", 0, "scale-not-positive", r"1 of 256 .*`up.scale`.*the first is 0 at \(2, 1\)"),
        ("up.scale", -0.1, "scale-not-positive", "-0.1 at"),
        ("down.scale", np.nan, "scale-not-positive", "`down.scale`.*nan"),
        ("up.scale", 1e-9, "scale-not-positive", "not positive and finite in float16"),
        ("up.scale", 1e6, "scale-not-positive", "in float16"),
        ("up.zero_point", np.inf, "zero-point-not-finite", "`up.zero_point`"),
    ],
)
def test_convert_refuses_what_cannot_be_deployed(rng, name, value, code, said):
    spec = QuantSpec(group_size=32, symmetric=False)
    mod, params = prepare_qat(Mlp, spec, params=mlp_params(rng))
    with pytest.raises(SitsError, match=said) as error:
        convert_qat(mod, broken(params, name, value), spec)
    assert codes(error.value.diagnostics) == [code]


def test_convert_lists_all_that_is_wrong(rng):
    mod, params = prepare_qat(Mlp, QuantSpec(group_size=32), params=mlp_params(rng))
    values = broken(params, "up.scale", -1)
    del values["bias"], values["down.scale"]
    with pytest.raises(SitsError) as error:
        convert_qat(mod, values, QuantSpec(bits=3, group_size=64))
    assert sorted(codes(error.value.diagnostics)) == sorted(
        ["spec-mismatch", "scale-not-positive", "spec-mismatch"] + ["params-missing"] * 2
    )
    assert "bits=4, not 3, group_size=32, not 64" in str(error.value)
    with pytest.raises(SitsError, match="no Relax function 'forward'"):
        convert_qat(mod, params, func="forward")
    with pytest.raises(SitsError, match=r"func is empty.*\nhelp: its functions are main"):
        convert_qat(mod, params, func=())


@pytest.mark.parametrize("spec", [None, QuantSpec(group_size=32)])
def test_convert_refuses_what_prepare_qat_has_not_prepared(rng, spec):
    with pytest.raises(SitsError, match=r"prepare_qat") as error:
        convert_qat(Mlp, mlp_params(rng), spec)
    assert codes(error.value.diagnostics) == ["nothing-to-convert"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (
            {"scales": "lsq"},
            "qat-option",
            "scales='lsq' is not supported",
        ),
        ({"activation": "int2"}, "qat-option", "activation='int2' is not supported"),
        ({"func": "forward"}, "no-such-function", "'forward'"),
        ({"func": ()}, "no-such-function", "func is empty"),
        ({"only": ("none",)}, "nothing-to-quantize", "none of only="),
        ({"skip": ("*",)}, "nothing-to-quantize", r"^error\S* no weight can[^$]*: skip has"),
        ({"params": {"up": np.zeros((2, 2), "float32")}}, "params-mismatch", "up"),
    ],
)
def test_prepare_refuses(rng, options, code, said):
    options = {"params": mlp_params(rng), **options}
    with pytest.raises(SitsError, match=said) as error:
        prepare_qat(Mlp, QuantSpec(group_size=32), **options)
    assert code in codes(error.value.diagnostics)


def test_prepare_refuses_weights_that_are_not_finite(rng):
    params = mlp_params(rng)
    params["up"][3, 3], params["down"][0, 0] = np.nan, np.inf
    with pytest.raises(SitsError) as error:
        prepare_qat(Mlp, QuantSpec(group_size=32), params=params)
    assert codes(error.value.diagnostics) == ["weight-not-quantizable"] * 2


def test_an_activation_of_the_spec_that_has_no_effect_is_told(rng):
    plain, spec = QuantSpec(group_size=32), QuantSpec(group_size=32, activation="int8")
    params = mlp_params(rng)
    with collect() as found:
        mod, values = prepare_qat(Mlp, spec, params=params)
    assert [(d.severity, d.code) for d in found] == [("warning", "qat-activation")]
    assert "write prepare_qat(…, activation='int8')" in found[0].help
    with collect() as found:
        prepare_qat(Mlp, QuantSpec(group_size=32, activation="bfloat16"), params=params)
    assert [d.code for d in found] == ["qat-activation"]
    assert "bfloat16 activations are not trained" in found[0].help
    with collect() as found:
        convert_qat(mod, values, spec)
    assert [(d.severity, d.code) for d in found] == [("warning", "qat-activation")]
    with collect() as found:
        prepare_qat(Mlp, spec, params=params, activation="int8")
        prepare_qat(Mlp, plain, params=params, activation="int8")
        convert_qat(mod, values, plain)
        convert_qat(mod, values)
    assert found == []

"""prepare_qat and convert_qat: what is trained is what is deployed, bit for bit."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import qat_training as training
import tvm
from quantize_reference import Grid, quantized
from small_modules import Mlp, mlp_params, one_function, run_main
from tvm import relax

import sits_tvm
from relax_passes import PackFakeQuantizedWeights
from sits_tvm import Config, QuantSpec, convert_qat, prepare_qat
from tir_schedules.int4_format.packing import PackedLayout, unpack

OP = relax.op
SPECS = [
    QuantSpec(bits=b, group_size=g, symmetric=s, scale_dtype=d)
    for b, (g, d), s in itertools.product(
        (2, 3, 4), ((32, "float16"), (128, "float32"), (-1, "float16")), (True, False)
    )
]


def trained(params, rng):
    """As training leaves parameters: everything a little off, zero points between integers."""
    arrays = training.copied(params)
    for name, value in arrays.items():
        noise = rng.uniform(-0.3, 0.3, value.shape).astype("float32")
        arrays[name] = value * (1 + noise) + (8 * noise if name.endswith("zero_point") else 0)
    return arrays


def linear(rng, k=100):
    """A weight with ragged groups, stored as (24, k), and its module."""
    s = tvm.tirx.Var("s", "int64")
    types = (relax.TensorType((s, k), "float32"), relax.TensorType((24, k), "float32"))
    mod = one_function(
        lambda bb, x, w: OP.matmul(x, bb.emit(OP.permute_dims(w))), *types, num_input=1
    )
    return mod, {"a1": rng.standard_normal((24, k)).astype("float32")}


def forward_weight(mod, params):
    """The compiled fake_quantize of the training module alone: x is the identity."""
    order = [argument.name for argument in mod["main"].params[1:]]
    columns = params["a1"].shape[1]
    return run_main(mod, np.eye(columns, dtype="float32"), *(params[name] for name in order)).T


def reference(params, spec):
    """fake_quantize in float64 NumPy, rounded once."""
    grid = Grid(
        bits=spec.bits,
        group_size=spec.group_size,
        signed=spec.symmetric,
        scale_dtype=spec.scale_dtype,
    )
    zero_point = params.get("a1.zero_point")
    return quantized(params["a1"], params["a1.scale"], zero_point, grid).value.astype("float32")


@pytest.mark.parametrize("scales", ["learned", "absmax"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_deployed_weights_are_those_of_the_forward_pass(rng, spec, scales):
    """Packed codes, unpacked, against what training multiplies by: compiled, and a reference."""
    mod, params = linear(rng)
    mod, params = prepare_qat(mod, spec, params=params, scales=scales)
    params = trained(params, rng)
    want = forward_weight(mod, params) if scales == "absmax" else reference(params, spec)
    deployed, frozen = convert_qat(mod, params, spec)
    layout = PackedLayout(24, 100, spec, "vectors")
    deployed = PackFakeQuantizedWeights(order="vectors")(deployed)
    _, packed = sits_tvm.params.pack_params(deployed, frozen)
    parts = tuple(packed[f"a1.{name}"].numpy() for name in layout.names)
    np.testing.assert_array_equal(unpack(parts, layout), want)
    if scales == "learned" and spec.bits == 3:
        np.testing.assert_array_equal(want, forward_weight(mod, params))


@pytest.mark.parametrize(("scales", "activation"), [("learned", None), ("absmax", "int8")])
def test_logits_differ_by_the_order_of_sums(rng, scales, activation):
    """Both orientations, symbolic batch and length."""
    spec = QuantSpec(bits=3, group_size=32, symmetric=False)
    options = {"scales": scales, "activation": activation}
    mod, params = prepare_qat(Mlp, spec, params=mlp_params(rng), **options)
    params = trained(params, rng)
    x = rng.standard_normal((2, 3, 64)).astype("float32")
    want = run_main(mod, x, *(params[argument.name] for argument in mod["main"].params[1:]))
    deployed, frozen = convert_qat(mod, params, spec)
    built = sits_tvm.build(deployed, "llvm -mcpu=native", params=frozen)
    assert [row.name for row in built.report.quantized] == ["up", "down"]
    assert not any(name in built.params for name in ("up", "down"))
    got = relax.VirtualMachine(built, tvm.cpu())["main"](x, *built.param_list).numpy()
    # a code of the second activation may flip where the first product differs in its last bit
    limit = 2e-6 if activation is None else 2e-2
    np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max())


@pytest.mark.parametrize("activation", ["int8", "int4"])
def test_weights_that_were_trained_are_for_products_of_integers(rng, activation):
    """Of the module that was given, whose rows of up to 128 columns have one scale, too."""
    spec, options = QuantSpec(group_size=32), {"scales": "absmax", "activation": activation}
    mod, params = prepare_qat(Mlp, spec, params=mlp_params(rng), **options)
    params = trained(params, rng)
    x = rng.standard_normal((2, 3, 64)).astype("float32")
    want = run_main(mod, x, *(params[argument.name] for argument in mod["main"].params[1:]))
    config = Config(quant=replace(spec, activation=activation))
    built = sits_tvm.build(Mlp, "llvm -mcpu=native", params=params, config=config)
    name = "int4_int4_matmul" if activation == "int4" else "int8_matmul"
    assert sum(name in kernel.name for kernel in built.report.kernels) == 2
    got = relax.VirtualMachine(built, tvm.cpu())["main"](x, *built.param_list).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize(("activation", "bits"), [("int8", 8), ("int4", 4)])
def test_activations_have_codes_of_the_bits_that_are_asked_for(rng, activation, bits):
    spec = QuantSpec(bits=3, group_size=32)
    mod, _ = prepare_qat(Mlp, spec, params=mlp_params(rng), scales="absmax", activation=activation)
    lines = [line for line in mod.script().splitlines() if "group_size=-1" in line]
    assert len(lines) == 4  # a scale and codes before each product
    assert all(f"bits={bits}" in line for line in lines)


def test_learned_scales_start_where_rounding_puts_them(rng):
    """Before a step of training, QAT deploys what Config(quant=spec) does."""
    spec = QuantSpec(group_size=32, symmetric=False, scale_method="mse")
    params = mlp_params(rng)
    mod, start = prepare_qat(Mlp, spec, params=params)
    assert [a.name for a in mod["main"].params] == [
        "x", "up", "bias", "down", "up.scale", "up.zero_point", "down.scale", "down.zero_point",
    ]  # fmt: skip
    mod, frozen = convert_qat(mod, start, spec)
    deployed = sits_tvm.build(mod, "llvm", params=frozen)
    rounded = sits_tvm.build(Mlp, "llvm", params=params, config=Config(quant=spec))
    assert list(deployed.params) == list(rounded.params)
    for name, value in rounded.params.items():
        np.testing.assert_array_equal(deployed.params[name].numpy(), value.numpy())


def test_a_head_that_is_tied_to_its_embedding_stays_a_head(rng):
    """One fake-quantized table, looked up and multiplied by; packed once."""
    types = relax.TensorType((5,), "int64"), relax.TensorType((40, 64), "float32")

    def tied(bb, ids, table):
        rows = bb.emit(OP.take(table, ids, 0))
        return OP.matmul(rows, bb.emit(OP.permute_dims(table)))

    params = {"a1": rng.standard_normal((40, 64)).astype("float32")}
    spec = QuantSpec(group_size=32, scale_dtype="float32")
    options = {"quantize_embedding": True, "quantize_head": True}
    mod, start = prepare_qat(
        one_function(tied, *types, num_input=1), spec, params=params, **options
    )
    start = training.copied(start)
    table, ids = reference(start, spec), np.array([3, 0, 39, 3, 7])
    want = table[ids] @ table.T
    got = run_main(mod, ids, *(start[argument.name] for argument in mod["main"].params[1:]))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    deployed, frozen = convert_qat(mod, start, spec)
    built = sits_tvm.build(deployed, "llvm -mcpu=native", params=frozen)
    assert list(built.params) == ["a1.codes", "a1.scale"]
    got = relax.VirtualMachine(built, tvm.cpu())["main"](ids, *built.param_list).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("scales", ["learned", "absmax"])
def test_a_weight_read_both_ways_is_packed_twice(rng, scales):
    """x @ w.T @ w: groups along the rows for one product, along the columns for the other."""
    types = relax.TensorType((5, 64), "float32"), relax.TensorType((48, 64), "float32")

    def there_and_back(bb, x, w):
        hidden = bb.emit(OP.matmul(x, bb.emit(OP.permute_dims(w))))
        return OP.matmul(hidden, w)

    mod = one_function(there_and_back, *types, num_input=1)
    params = {"a1": rng.standard_normal((48, 64)).astype("float32")}
    spec = QuantSpec(group_size=32)
    mod, start = prepare_qat(mod, spec, params=params, scales=scales)
    x = rng.standard_normal((5, 64)).astype("float32")
    want = run_main(mod, x, *(start[argument.name] for argument in mod["main"].params[1:]))
    deployed, frozen = convert_qat(mod, start, spec)
    built = sits_tvm.build(deployed, "llvm -mcpu=native", params=frozen)
    assert list(built.params) == [
        f"a1.{part}" for part in ("codes", "scale", "transposed.codes", "transposed.scale")
    ]
    got = relax.VirtualMachine(built, tvm.cpu())["main"](x, *built.param_list).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_the_functions_of_training_go(rng):
    mod, params = linear(rng)
    qat, values = prepare_qat(mod, QuantSpec(group_size=32), params=params)
    ty = relax.TensorType((2, 24), "float32")
    fixed = qat.clone()
    fixed["main"] = relax.utils.copy_with_new_vars(qat["main"]).bind_symbolic_vars({"s": 2})
    loss = relax.training.AppendLoss("main", relax.training.loss.MSELoss()(ty, ty), 1, "loss")
    train = sits_tvm.differentiate(loss(fixed), "loss", list(values))
    deployed, weights = convert_qat(train, values)
    assert [gvar.name_hint for gvar in deployed.get_global_vars()] == ["main"]
    sits_tvm.build(deployed, "llvm -mcpu=native", params=weights)


def test_dead_parameters_go(rng):
    mod, params = linear(rng)
    mod, params = prepare_qat(mod, QuantSpec(group_size=32), params=params)
    func = mod["main"]
    unused = relax.Var("unused", relax.TensorType((3,), "float32"))
    mod["main"] = relax.Function(
        [*func.params, unused], func.body, func.ret_ty, func.is_pure, func.attrs
    )
    deployed, frozen = convert_qat(mod, {**params, "unused": np.zeros(3, "float32")})
    assert [a.name for a in deployed["main"].params] == ["a0", "a1", "a1.scale"]
    assert list(frozen) == ["a1", "a1.scale"]

"""Builds in which products of one input are one call, with their weights stacked."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import tvm
from small_builds import CPU, G32, refused
from small_modules import restored
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import Config
from sits_tvm.report import Report

QUANT = Config(quant=replace(G32, activation="int8"))
QKV = ["q.weight", "k.weight", "v.weight"]


class Attention(torch.nn.Module):
    """Grouped-query attention with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(64, n) for n in (64, 32, 32))
        self.o = torch.nn.Linear(64, 64)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            p(x).view(b, s, p.out_features // 16, 16).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return self.o(y.transpose(1, 2).reshape(b, s, 64))


@cache
def imported(dtype=torch.float32):
    torch.manual_seed(0)
    model = Attention().to(dtype).eval()
    dims = {"x": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)}
    x = torch.randn(2, 5, 64, dtype=dtype)
    return model, *sits_tvm.from_torch(model, (x,), dynamic_shapes=dims)


@cache
def built_with(activation, dtype=torch.float32):
    _, mod, params = imported(dtype)
    config = Config(quant=replace(G32, activation=activation))
    return sits_tvm.build(mod, CPU, params=params, config=config)


def exact(model, spec):
    """The model in float64, with weights as `spec` stores them."""
    copy = Attention().double()
    copy.load_state_dict(model.state_dict())
    for name, weight in copy.named_parameters():
        if name.endswith("weight"):
            weight.data = torch.from_numpy(restored(weight.detach().numpy(), spec))
    return copy


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 7, 64), (3, 40, 64), (2, 0, 64)])
@pytest.mark.parametrize("activation", [None, "int8"])
def test_right_for_every_batch_and_length(shape, activation):
    model, _, _ = imported()
    built = built_with(activation)
    assert len(built.report.stacked) == (activation == "int8")
    x = torch.randn(shape)
    vm = relax.VirtualMachine(built, tvm.cpu())
    got = vm["main"](x.numpy(), *built.param_list).numpy()
    want = exact(model, G32)(x.double()).detach().numpy()
    atol = (2e-6 if activation is None else 2e-2) * np.abs(want).max(initial=1)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_int4_activations_stack_their_weights_too():
    _, mod, params = imported()
    config = Config(quant=replace(G32, activation="int4"))
    _, report = sits_tvm.lower(mod, CPU, params=params, config=config)
    assert [list(row.names) for row in report.stacked] == [QKV]


def test_says_which_weights_became_one_call():
    built = built_with("int8")
    (row,) = built.report.stacked
    assert (row.function, list(row.names), row.reason) == ("main", QKV, "")
    assert "products of one input: 1 calls with stacked weights" in str(built.report)
    assert Report.from_json(built.report.to_json()).stacked == built.report.stacked


def test_saved_and_loaded_it_is_the_same(tmp_path):
    built = built_with("int8")
    name = "+".join(QKV)
    assert {f"{name}.{part}" for part in ("codes", "scale", "zero_point")} < built.params.keys()
    loaded = sits_tvm.load(built.save(tmp_path / "saved"))
    x = np.random.default_rng(0).standard_normal((2, 3, 64)).astype("float32")
    ran = [
        relax.VirtualMachine(ex, tvm.cpu())["main"](x, *ex.param_list).numpy()
        for ex in (built, loaded)
    ]
    np.testing.assert_array_equal(*ran)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_the_executable_packs_as_the_build_does(dtype):
    _, mod, params = imported(dtype)
    with_params = built_with("int8", dtype)
    marked = mod.clone()
    marked["main"] = mod["main"].with_attr("num_input", 1)
    without = sits_tvm.build(marked, CPU, config=QUANT)
    vm = relax.VirtualMachine(without, tvm.cpu())
    packed = vm["main_transform_params"]([params[p.name] for p in mod["main"].params[1:]])
    for got, want in zip(packed, with_params.param_list, strict=True):
        assert str(got.dtype) == str(want.dtype)
        if str(got.dtype) != "bfloat16":
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_names_each_weight_that_is_not_finite():
    _, mod, params = imported()
    arrays = {name: value.numpy().copy() for name, value in params.items()}
    arrays["k.weight"][3, 5] = np.nan
    (found,) = refused(mod, CPU, params=arrays, config=QUANT)
    assert found.code == "weight-not-quantizable"
    assert found.message.startswith("`k.weight`: ")


@pytest.mark.parametrize("activation", [None, "bfloat16"])
def test_products_of_float_activations_stay_apart(activation):
    _, mod, params = imported()
    config = Config(quant=replace(G32, activation=activation))
    lowered, report = sits_tvm.lower(mod, CPU, params=params, config=config)
    assert report.stacked == []
    assert {f"{name}.codes" for name in QKV} <= {p.name for p in lowered["main"].params}


class Adapted(torch.nn.Module):
    """A low-rank adapter, whose product is added to columns of another."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(64, 16, bias=False)
        self.b = torch.nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return self.w(x) + self.b(self.a(x))


def test_an_adapter_beside_the_weight_it_adapts():
    torch.manual_seed(0)
    model, x = Adapted().eval(), torch.randn(3, 64)
    mod, params = sits_tvm.from_torch(model, (x,))
    built = sits_tvm.build(mod, CPU, params=params, config=replace(QUANT, skip=("b.weight",)))
    assert [list(row.names) for row in built.report.stacked] == [["w.weight", "a.weight"]]
    assert [note.code for note in built.report.diagnostics] == ["skipped", "columns-copied"]
    got = relax.VirtualMachine(built, tvm.cpu())["main"](x.numpy(), *built.param_list).numpy()
    exact = model.double()
    for part in (exact.w, exact.a):
        part.weight.data = torch.from_numpy(restored(part.weight.detach().float().numpy(), G32))
    want = exact(x.double()).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


@I.ir_module
class PartlyTrained:
    """A fake-quantized weight before two that are quantized here."""

    @R.function
    def main(
        x: R.Tensor(("s", 64), "float32"),
        w: R.Tensor((64, 64), "float32"),
        w_scale: R.Tensor((64, 2), "float16"),
        k: R.Tensor((32, 64), "float32"),
        v: R.Tensor((32, 64), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            fake = R.sits.fake_quantize(w, w_scale, group_size=32, scale_dtype="float16")
            h = R.matmul(x, R.permute_dims(fake))
            keys = R.matmul(h, R.permute_dims(k))
            values = R.matmul(h, R.permute_dims(v))
            R.output(keys, values)
        return (keys, values)


def test_one_transform_function_packs_both_kinds(rng):
    shapes = {"w": (64, 64), "k": (32, 64), "v": (32, 64)}
    params = {name: rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    params["w_scale"] = (np.abs(params["w"]).reshape(64, 2, 32).max(-1) / 7).astype("float16")
    ordered = [tvm.runtime.tensor(params[name]) for name in ("w", "w_scale", "k", "v")]
    with_params = sits_tvm.build(PartlyTrained, CPU, params=params, config=QUANT)
    without = sits_tvm.build(PartlyTrained, CPU, config=QUANT)
    packed = relax.VirtualMachine(without, tvm.cpu())["main_transform_params"](ordered)
    for got, want in zip(packed, with_params.param_list, strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy())
    assert [list(row.names) for row in without.report.stacked] == [["k", "v"]]

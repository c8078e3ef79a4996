"""from_pretrained: 4-bit checkpoints of GPTQ, AWQ and compressed-tensors, packed here in NumPy."""

import json

import numpy as np
import pytest
import tvm
from tiny_models import tiny, tokens
from tvm import relax

import sits_tvm
from relax_passes.packed_weights.stored_codes import StoredCodes
from sits_tvm import Config, QuantSpec, from_pretrained
from sits_tvm.diagnostics import SitsError, collect
from sits_tvm.frontends._packed_checkpoints import read_packed
from sits_tvm.frontends._stored_codes import with_stored_codes
from tir_schedules.int4_format.packing import PackedLayout, unpack, unpack_parts

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

GROUP = 32
HEAD = PackedLayout(97, 64, QuantSpec(group_size=64), "vectors")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def words(values):
    """(r, c) values 0…15 as int32 (r, c / 8), the first in the lowest bits."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % 8))).astype("int64")
    parts = padded.reshape(len(values), -1, 8) << (4 * np.arange(8))
    return parts.sum(-1).astype("uint32").view("int32")


def gptq(codes, scale, zero, minus_one=1):
    k = codes.shape[1]
    return {
        "qweight": words(codes).T,
        "qzeros": words(zero.T.astype("int64") - minus_one),
        "scales": scale.T,
        "g_idx": np.arange(k, dtype="int32") // GROUP,
    }


def awq(codes, scale, zero):
    def interleaved(values):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return words(values.reshape(len(values), -1, 8)[:, :, order].reshape(values.shape))

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zero.T), "scales": scale.T}


def compressed(codes, scale, zero):
    shape = np.array(codes.shape, "int64")
    found = {"weight_packed": words(codes), "weight_scale": scale, "weight_shape": shape}
    return found if (zero == 8).all() else {**found, "weight_zero_point": words(zero.T).T}


SCHEME = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}


def compressed_config(**weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": {**SCHEME, **weights}}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
V1, V2 = ({**GPTQ, "checkpoint_format": name} for name in ("gptq", "gptq_v2"))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
# name: quantization_config, packer, symmetric
FORMATS = {
    "gptq v1": (V1, gptq, False),
    "gptq v2": (V2, lambda *parts: gptq(*parts, minus_one=0), False),
    "gptq symmetric": ({**GPTQ, "sym": True}, gptq, True),
    "awq": (AWQ, awq, False),
    "compressed": (compressed_config(symmetric=False), compressed, False),
    "compressed symmetric": (compressed_config(symmetric=True), compressed, True),
}


LAYER = "model.layers.0.mlp.down_proj"


def draw(n, k, symmetric):
    """Codes, scales and zero points."""
    rng = np.random.default_rng([n, k])
    scale = rng.uniform(0.01, 0.03, (n, k // GROUP)).astype("float16")
    zero = np.full(scale.shape, 8) if symmetric else rng.integers(1, 16, scale.shape)
    return rng.integers(0, 16, (n, k)), scale, zero


def floats(codes, scale, zero, groups=None):
    """In float64; `groups`: of each column."""
    groups = np.arange(codes.shape[1]) // GROUP if groups is None else groups
    return (codes - zero[:, groups].astype("float64")) * scale[:, groups]


def save(path, declared, tensors, config=None):
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    safetensors.save_file(arrays, path / "model.safetensors")
    whole = {**(config or {}), "quantization_config": declared}
    (path / "config.json").write_text(json.dumps(whole))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_read_as_they_are(name, tmp_path):
    """In every layout; what they stand for is the weight in float64, rounded once."""
    declared, packer, symmetric = FORMATS[name]
    codes, scale, zero = draw(16, 96, symmetric)
    tensors = {f"{LAYER}.{part}": array for part, array in packer(codes, scale, zero).items()}
    save(tmp_path, declared, {**tensors, "norm.weight": scale, f"{LAYER}.bias": scale})
    others, stored = read_packed(tmp_path)
    assert others.keys() == {"norm.weight", f"{LAYER}.bias"}
    weight = stored[f"{LAYER}.weight"]
    assert (weight.zero_point is None) == symmetric
    np.testing.assert_array_equal(weight.codes, codes - 8 if symmetric else codes)
    np.testing.assert_array_equal(weight.scale, scale)
    if not symmetric:
        np.testing.assert_array_equal(weight.zero_point, zero)
    np.testing.assert_array_equal(
        weight.dequantized(), floats(codes, scale, zero).astype("float32")
    )


def by_activation(k, layer=0):
    """The groups of columns that act-order leaves."""
    return np.random.default_rng([layer, k]).permutation(k).astype("int32") // GROUP


ACT_ORDER = {
    "gptq": (
        {**V1, "desc_act": True},
        lambda *parts, groups: {**gptq(*parts), "g_idx": groups},
    ),
    "compressed": (
        compressed_config(symmetric=False, actorder="group"),
        lambda *parts, groups: {**compressed(*parts), "weight_g_idx": groups},
    ),
}


def linears(names, n, k):
    """x @ W.T of each weight but the last, which is negated."""
    x = relax.Var("x", relax.TensorType((tvm.tirx.Var("s", "int64"), k), "float32"))
    weights = [relax.Var(name, relax.TensorType((n, k), "float32")) for name in names]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, *weights], attrs={"num_input": 1}):
        with builder.dataflow():
            results = [builder.emit(relax.op.linear(x, weight)) for weight in weights[:-1]]
            results.append(builder.emit(relax.op.negative(weights[-1])))
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("name", ACT_ORDER)
def test_columns_in_the_order_of_activations(name, tmp_path):
    """Products take the columns of x in the order of the codes; other readers get W."""
    declared, packer = ACT_ORDER[name]
    k, tensors, want = 96, {}, {}
    for i, layer in enumerate("abc"):
        parts, groups = draw(16, k, False), by_activation(k, i)
        packed = packer(*parts, groups=groups)
        tensors |= {f"{layer}.{part}": array for part, array in packed.items()}
        want[f"{layer}.weight"] = floats(*parts, groups)
    save(tmp_path, declared, tensors)
    _, stored = read_packed(tmp_path)
    for weight, values in want.items():
        np.testing.assert_array_equal(stored[weight].dequantized(), values.astype("float32"))
    weight = tvm.runtime.tensor(np.zeros((16, k), "float32"))
    mod, params = with_stored_codes(linears(want, 16, k), dict.fromkeys(want, weight), stored)
    ex = sits_tvm.build(mod, "llvm", params=params)
    assert [row.name for row in ex.report.quantized] == ["a.weight", "b.weight"]
    x = np.random.default_rng(0).standard_normal((3, k)).astype("float32")
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](x, *ex.param_list)
    *products, negated = want.values()
    wanted = [*(x.astype("float64") @ values.T for values in products), -negated]
    for y, exact in zip(got, wanted, strict=True):
        np.testing.assert_allclose(y.numpy(), exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def write(path, name):
    """A directory, the float model that it stands for, and what `draw` gave, by name."""
    declared, packer, symmetric = FORMATS[name]
    model, half = tiny("Llama", **SIZES), tiny("Llama", **SIZES).half()
    half.save_pretrained(path)
    state, given, tensors = half.state_dict(), {}, {}
    for weight, value in state.items():
        layer = weight.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[weight] = value.numpy()
            continue
        given[weight] = draw(*value.shape, symmetric)
        parts = packer(*given[weight])
        tensors |= {f"{layer}.{part}": array for part, array in parts.items()}
        state[weight] = torch.from_numpy(floats(*given[weight]))
    save(path, declared, tensors, json.loads((path / "config.json").read_text()))
    model.load_state_dict(state)
    return model, given


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(FORMATS)[1:]]


@pytest.mark.parametrize("name", ["gptq v1", *SLOW])
def test_a_model_is_built_of_the_codes_of_its_file(name, tmp_path):
    """Bit for bit, whatever the config asks for; logits are those of torch with float weights."""
    model, given = write(tmp_path, name)
    mod, params = from_pretrained(tmp_path, dtype="float32")
    config = Config(quant=QuantSpec(group_size=64), quantize_head=True)
    ex = sits_tvm.build(mod, "llvm", params=params, config=config)
    assert {row.name for row in ex.report.quantized} == {*given, "lm_head.weight"}
    spec = QuantSpec(group_size=GROUP, symmetric=FORMATS[name][2])
    for weight, wanted in given.items():
        layout = PackedLayout(*wanted[0].shape, spec, "vectors")
        parts = (ex.params[f"{weight}.{part}"].numpy() for part in layout.names)
        for got, want in zip(unpack_parts(tuple(parts), layout), wanted, strict=True):
            if got is not None:
                np.testing.assert_array_equal(got, want)
    head = unpack(tuple(ex.params[f"lm_head.weight.{p}"].numpy() for p in ("codes", "scale")), HEAD)
    model.lm_head.weight.data = torch.from_numpy(head)
    ids = tokens(2, 9)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.numpy()
    vm = relax.VirtualMachine(ex, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(ids.numpy()), *ex.param_list).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def refused(path, declared, tensors):
    save(path, declared, {f"{LAYER}.{part}": array for part, array in tensors.items()})
    with pytest.raises(SitsError) as caught:
        read_packed(path)
    assert {d.code for d in caught.value.diagnostics} == {"packed-checkpoint"}
    return str(caught.value)


def test_what_is_ambiguous_or_not_4_bits_is_refused(tmp_path):
    """With what to write instead."""
    parts = draw(16, 96, False)
    v1, v2 = gptq(*parts), gptq(*parts, minus_one=0)
    uneven = {**v1, "g_idx": v1["g_idx"] * 0}
    unknown = {name: v1[name] for name in ("qweight", "qzeros", "scales")}
    nan = {**v1, "scales": v1["scales"] * np.float16("nan")}
    actorder = compressed_config(actorder="group")
    cases = [
        (GPTQ, v1, 'write "gptq" (minus one'),
        ({**GPTQ, "sym": True}, v1, "no checkpoint_format"),
        ({**V1, "sym": True}, v1, '"sym": true'),
        (V1, gptq(*parts[:2], parts[2] * 0 + 16), "stands for 16"),
        (V1, uneven, "g_idx (96,) does not give 32 of its 96 columns to each group"),
        ({**V1, "desc_act": True}, unknown, "lacks 'g_idx'"),
        (actorder, compressed(*draw(16, 96, True)), "lacks 'weight_g_idx'"),
        (V1, nan, f"model.safetensors: `{LAYER}`: scales holds NaN or infinite values"),
        ({**V1, "bits": 3}, v1, "has 3 bits"),
        ({**V1, "group_size": None}, v1, "group_size=None"),
        ({**AWQ, "group_size": 48}, awq(*parts), "in groups of 48"),
        ({**V1, "checkpoint_format": "marlin"}, v1, "'marlin'"),
        (V2, {**v2, "qweight": v2["qweight"].astype("int64")}, "not a matrix of int32"),
        (V2, {**v2, "scales": v2["scales"].astype("int8")}, "not floats"),
        (V2, {n: v2[n] for n in ("qweight", "scales")}, "lacks 'qzeros'"),
        ({**AWQ, "version": "gemv"}, awq(*parts), 'version="GEMM"'),
        ({"quant_method": "fp8"}, v1, "'fp8'"),
        (AWQ, {"weight": v1["scales"]}, "no tensor *.qweight"),
        (compressed_config(strategy="tensor"), compressed(*parts), "strategy='tensor'"),
        ({**compressed_config(), "format": "marlin-24"}, compressed(*parts), "'marlin-24'"),
        (compressed_config(symmetric=False), compressed(*draw(16, 96, True)), "lacks 'weight_ze"),
    ]
    for declared, tensors, wanted in cases:
        assert wanted in refused(tmp_path, declared, tensors), wanted


def test_a_fault_of_all_layers_is_told_once(tmp_path):
    codes = gptq(*draw(16, 96, False))
    layers = {f"{layer}.{name}": part for layer in "abc" for name, part in codes.items()}
    text = refused(tmp_path, GPTQ, layers)
    assert text.count("no checkpoint_format") == 1
    assert f"`{LAYER}.a` and 2 more: " in text


def test_codes_of_another_model_are_refused(tmp_path):
    codes, scale, zero = draw(16, 96, True)
    weight = StoredCodes.of(codes.astype("uint8"), scale, zero, GROUP)
    with pytest.raises(SitsError, match="no such weight"):
        with_stored_codes(tvm.IRModule(), {}, {"other.weight": weight})


def test_other_files_of_the_directory_are_left_alone(tmp_path):
    """Such as an older copy; files that no index joins are refused."""
    codes, scale, zero = draw(16, 96, False)
    tensors = {f"{LAYER}.{part}": array for part, array in gptq(codes, scale, zero).items()}
    save(tmp_path, V1, tensors)
    changed = {**tensors, f"{LAYER}.qweight": ~tensors[f"{LAYER}.qweight"]}
    safetensors.save_file(changed, tmp_path / "z.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    for name in ("model.safetensors", "model-1.safetensors"):
        (tmp_path / "model.safetensors").rename(tmp_path / name)
        _, stored = read_packed(tmp_path)
        np.testing.assert_array_equal(stored[f"{LAYER}.weight"].codes, codes)
    index.unlink()
    with pytest.raises(SitsError, match=r"has model-1\.safetensors, z\.safetensors, and no index"):
        read_packed(tmp_path)


def test_what_the_model_has_no_place_for_is_told(tmp_path):
    """A bias of zeros changes nothing, and some packers write it to every layer."""
    write(tmp_path, "gptq v1")
    path = tmp_path / "model.safetensors"
    extra = {f"{LAYER}.bias": np.ones(64, "float16"), "norm.bias": np.zeros(64, "float16")}
    safetensors.save_file({**safetensors.load_file(path), **extra}, path)
    with collect() as found:
        from_pretrained(tmp_path)
    (warning,) = found
    assert (warning.severity, warning.code) == ("warning", "weights-unused")
    assert f"not read, as the model has none such: {LAYER}.bias" in warning.message

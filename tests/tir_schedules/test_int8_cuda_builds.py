"""W4A8 and W4A4 builds for CUDA: what their kernels compute, run on the host, against float64."""

import ml_dtypes  # noqa: F401  NumPy's bfloat16
import numpy as np
import pytest
from cuda_text import CudaText
from int8_runs import product, quantized
from tvm import relax

import sits_tvm
from sits_tvm import Config, QuantSpec
from tir_schedules.int4_format.packing import PackedLayout

TARGET = sits_tvm.parse_target("cuda -arch=sm_90")
K, N = 288, 48
UNIT = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def gated(dtype, rows):
    """silu(x W1 + bias) * (x W2)."""
    x = relax.Var("x", relax.TensorType((*rows, K), dtype))
    weights = [relax.Var(name, relax.TensorType((N, K), dtype)) for name in ("w1", "w2")]
    bias, bb = relax.Var("bias", relax.TensorType((N,), dtype)), relax.BlockBuilder()
    with bb.function("main", [x, *weights, bias], attrs={"num_input": 1}):
        with bb.dataflow():
            gate, up = (
                bb.emit(relax.op.matmul(x, bb.emit(relax.op.permute_dims(w)))) for w in weights
            )
            gate = bb.emit(relax.op.nn.silu(bb.emit(relax.op.add(gate, bias))))
            y = bb.emit_output(relax.op.multiply(gate, up))
        bb.emit_func_output(y)
    return bb.get()


class Kernels:
    """``run(*arrays)`` runs main of a lowered module, its kernels as CUDA text on the host."""

    def __init__(self, mod):
        self.mod, self.texts = mod, {}

    def __call__(self, *arrays):
        main = self.mod["main"]
        values = dict(zip(main.params, arrays, strict=True))
        for block in main.body.blocks:
            for binding in block.bindings:
                values[binding.var] = self._value(binding.value, values)
        return values[main.body.body]

    def _value(self, value, values):
        if isinstance(value, relax.Var):
            return values[value]
        if isinstance(value, relax.TupleGetItem):
            return values[value.tuple_value][value.index]
        assert value.op.name == "relax.call_tir", value
        types = value.ty_args[0]
        types = list(types.fields) if isinstance(types, relax.TupleType) else [types]
        made = [np.empty([int(d) for d in t.shape], str(t.dtype)) for t in types]
        self._text(value.args[0], len(made))(*(values[x] for x in value.args[1]), *made)
        return made if len(made) > 1 else made[0]

    def _text(self, name, outputs):
        if name not in self.texts:
            self.texts[name] = CudaText(self.mod[name], TARGET, outputs=outputs)
        return self.texts[name]


def reference(x, params, parts, layout):
    """And what half a unit in a result of the two products may change."""
    codes, scale = quantized(x.reshape(-1, K).astype("float32"), layout)
    gate, up = (product(codes, scale, weight, layout)[0] for weight in parts)
    gate = gate + params["bias"].astype("float64")
    y = gate / (1 + np.exp(-gate)) * up
    return y.reshape(*x.shape[:-1], N), np.abs(y).max(initial=0) + np.abs(up).max(initial=0)


@pytest.mark.parametrize(
    ("activation", "dtype", "group_size", "symmetric", "rows"),
    [
        ("int8", "float16", 32, False, (1, 1)),
        ("int4", "float16", 32, False, (1, 1)),
        pytest.param("int8", "bfloat16", -1, True, (2, 3), marks=pytest.mark.slow),
        pytest.param("int4", "bfloat16", -1, True, (2, 3), marks=pytest.mark.slow),
        pytest.param("int8", "float32", 128, False, (2, 20), marks=pytest.mark.slow),
    ],
)
def test_values(rng, activation, dtype, group_size, symmetric, rows):
    spec = QuantSpec(group_size=group_size, symmetric=symmetric, activation=activation)
    shapes = {"w1": (N, K), "w2": (N, K), "bias": (N,)}
    params = {name: rng.standard_normal(s).astype(dtype) for name, s in shapes.items()}
    config = Config(quant=spec)
    built = sits_tvm.build(gated(dtype, rows), TARGET, params=params, config=config)
    run = Kernels(sits_tvm.lower(gated(dtype, rows), TARGET, params=params, config=config)[0])
    layout = PackedLayout(N, K, spec, "fragments")
    packed = {name: built.params[name].numpy() for name in built.params}
    parts = [[packed[f"{w}.{part}"] for part in layout.names] for w in ("w1", "w2")]
    x = rng.standard_normal((*rows, K)).astype(dtype)
    got = run(x, *(value.numpy() for value in built.param_list))
    want, size = reference(x, params, parts, layout)
    assert str(got.dtype) == dtype
    assert (np.abs(got.astype("float64") - want) <= UNIT[dtype] * size).all()

"""prepare_qat and convert_qat: which weights they take, and why the others stay in float."""

import numpy as np
import qat_training as training
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import QuantSpec, convert_qat, prepare_qat
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report


def test_choice_of_weights_and_reasons(rng):
    """only, skip, embeddings and heads as in a build; the report and notes say what stays."""
    model = training.transformer(40, 32, 1, 2, 8, 2)
    params, report = model.initial(rng), Report()
    spec = QuantSpec(group_size=32)
    with collect() as notes:
        _, values = prepare_qat(
            model.mod, spec, params=params, only=("block*",), skip=("*.v",), report=report
        )
    chosen = [name.removesuffix(".scale") for name in values if name.endswith(".scale")]
    assert chosen == [
        f"block0.{n}" for n in ("attention.q", "attention.k", "attention.out", "mlp.up", "mlp.down")
    ]
    assert [row.name for row in report.quantized] == chosen
    assert {row.name: row.reason.split(":")[0] for row in report.skipped} == {
        "embedding": "skipped",
        "block0.attention.v": "skipped",
        "head": "skipped",
    }
    assert len(notes) == 3
    _, everything = prepare_qat(
        model.mod, spec, params=params, quantize_embedding=True, quantize_head=True
    )
    assert {"embedding.scale", "head.scale"} <= set(everything)


@I.ir_module
class Caller:
    @R.function(private=True)
    def product(
        x: R.Tensor((4, 64), "float32"), w: R.Tensor((32, 64), "float32"),
        scale: R.Tensor((32, 2), "float32"),
    ) -> R.Tensor((4, 32), "float32"):  # fmt: skip
        q = R.sits.fake_quantize(w, scale, group_size=32)
        y = R.matmul(x, R.permute_dims(q))
        return y

    @R.function
    def main(
        x: R.Tensor((4, 64), "float32"), w: R.Tensor((32, 64), "float32"),
        scale: R.Tensor((32, 2), "float32"),
    ) -> R.Tensor((4, 32), "float32"):  # fmt: skip
        R.func_attr({"num_input": 1})
        y = Caller.product(x, w, scale)
        return y


def test_convert_takes_weights_that_a_called_function_quantizes(rng):
    params = {
        "w": rng.standard_normal((32, 64)).astype("float32"),
        "scale": np.ones((32, 2), "float32"),
    }
    deployed, frozen = convert_qat(Caller, params)
    assert set(frozen) == {"w", "scale"}
    built = sits_tvm.build(deployed, "llvm", params=frozen)
    assert [row.name for row in built.report.quantized] == ["w"]

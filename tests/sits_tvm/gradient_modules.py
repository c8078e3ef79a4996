"""Modules whose gradients are checked: a network, and adjoints written by hand."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R

import relax_passes.op  # noqa: F401  (registers R.sits.fake_quantize)


@I.ir_module
class Network:
    """Weights per group and per channel, an activation quantized per tensor, a loss of classes."""

    @R.function
    def main(
        x: R.Tensor((8, 32), "float32"),
        labels: R.Tensor((8,), "int64"),
        up: R.Tensor((16, 32), "float32"),
        up_scale: R.Tensor((16, 2), "float32"),
        gain: R.Tensor((16,), "float32"),
        shift: R.Tensor((16,), "float32"),
        act_scale: R.Tensor((), "float32"),
        head: R.Tensor((6, 16), "float32"),
        head_scale: R.Tensor((6,), "float32"),
    ):
        R.func_attr({"num_input": 2})
        with R.dataflow():
            upq = R.sits.fake_quantize(up, up_scale, group_size=16)
            h = R.matmul(x, R.permute_dims(upq))
            n = R.nn.layer_norm(h, gain, shift, axes=[-1])
            a = R.nn.gelu(n)
            q = R.sits.fake_quantize(a, act_scale, bits=8)
            headq = R.sits.fake_quantize(head, head_scale, axis=0)
            logits = R.matmul(q, R.permute_dims(headq))
            loss = R.nn.nll_loss(R.nn.log_softmax(logits), labels)
            R.output(loss, logits)
        return (loss, logits)


def by_hand(loss, seed, forward=None):
    """main(w) = loss(w), and an adjoint that returns 2 w times `seed`."""
    bb = relax.BlockBuilder()
    for name in ("main", "main_adjoint"):
        w = relax.Var("w", relax.TensorType((8,), "float32"))
        with bb.function(name, [w]):
            value = bb.emit((forward or loss)(bb, w) if name == "main_adjoint" else loss(bb, w))
            if name == "main":
                bb.emit_func_output(value)
                continue
            start = bb.emit(seed(), "gv_adjoint")
            found = bb.emit(O.multiply(bb.emit(O.add(w, w)), start), "w_adjoint_out")
            bb.emit_func_output(relax.Tuple([value, relax.Tuple([found])]))
    return bb.get()


def squares(bb, w):
    return O.sum(bb.emit(O.multiply(w, w)))


def ones():
    return O.ones((), "float32")

"""Linear layers with a fake-quantized weight, packed by PackFakeQuantizedWeights."""

import tvm
import tvm_ffi
from tvm import relax

from relax_passes import PackFakeQuantizedWeights
from relax_passes.op import fake_quantize
from sits_tvm import QuantSpec
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report
from tir_schedules.int4_format.packing import PackedLayout

OP = relax.op
N, K = 24, 96


def pack(before, order="rows"):
    """The pass, checked not to touch its input; its diagnostics and report."""
    report, digest = Report(), tvm_ffi.structural_hash(before)
    with collect() as found:
        after = PackFakeQuantizedWeights(order=order, report=report)(before)
    assert tvm_ffi.structural_hash(before) == digest
    return after, found, report


def linear(
    quantizer, weight=(N, K), scale=(N, 3), zero=None, turn=True, dtype="float32", num_input=1
):
    """main(x (s, k), w, s[, z]) = x @ quantizer(w, s[, z])."""
    s = tvm.tirx.Var("s", "int64")
    bb = relax.BlockBuilder()
    args = [
        relax.Var("x", relax.TensorType((s, weight[1] if turn else weight[0]), dtype)),
        relax.Var("w", relax.TensorType(weight, dtype)),
        relax.Var("w.scale", relax.TensorType(scale, "float32")),
    ]
    if zero is not None:
        args.append(relax.Var("w.zero_point", relax.TensorType(scale, zero)))
    with bb.function("main", args, attrs={} if num_input is None else {"num_input": num_input}):
        with bb.dataflow():
            w = bb.emit(quantizer(bb, *args[1:]))
            out = bb.emit_output(OP.matmul(args[0], bb.emit(OP.permute_dims(w)) if turn else w))
        bb.emit_func_output(out)
    return bb.get()


def with_attributes(**attributes):
    return lambda bb, *args: fake_quantize(*args, **attributes)


def codes_call(func):
    (call,) = [
        b.value for b in func.body.blocks[0].bindings if "int4_matmul" in str(b.value.op.name)
    ]
    return call


def layout_in(call):
    a = call.attrs
    spec = QuantSpec(
        bits=int(a["bits"]), group_size=int(a["group_size"]), symmetric=bool(a["symmetric"]),
        scale_dtype=str(a["scale_dtype"]),
    )  # fmt: skip
    return PackedLayout(int(a["n"]), int(a["k"]), spec, str(a["order"]))


def computed_parts(mod, values):
    """What the transform function of a packed module returns."""
    mod = mod.clone()
    del mod["main"]
    vm = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    parts = vm["main_transform_params"]([tvm.runtime.tensor(value) for value in values])
    return tuple(part.numpy() for part in parts)

"""Modules and files for test_wrong_inputs: what a user may get wrong."""

import contextlib
import io

import numpy as np
import onnx
import torch
import tvm
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config, QuantSpec, SitsError
from sits_tvm.__main__ import main

CPU = "llvm -mcpu=native"
QUANT = Config(quant=QuantSpec(group_size=32))
ONES = np.ones((32, 64), "float32")
W = {"w": ONES}


def linear(num_input=1, weight_first=False):
    """main(x (s, 64), w (32, 64))."""
    x = relax.Var("x", relax.TensorType((tirx.Var("s", "int64"), 64), "float32"))
    w = relax.Var("w", relax.TensorType((32, 64), "float32"))
    attrs = None if num_input is None else {"num_input": num_input}
    builder = relax.BlockBuilder()
    with builder.function("main", [w, x] if weight_first else [x, w], attrs=attrs):
        with builder.dataflow():
            y = builder.emit_output(relax.op.linear(x, w))
        builder.emit_func_output(y)
    return builder.get()


def identity(dtype):
    x = relax.Var("x", relax.TensorType((8,), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(x)
    return builder.get()


def emitted(op):
    """Of a call of `op` on x (4, 64)."""
    x = relax.Var("x", relax.TensorType((4, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op(x)))


def ones(*shape):
    return relax.const(np.ones(shape, "float32"))


class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Fourier(torch.nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).real


def onnx_model(op_type, domain):
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    node = onnx.helper.make_node(op_type, ["x"], ["y"], domain=domain)
    return onnx.helper.make_model(onnx.helper.make_graph([node], "graph", [x], [y]))


def trained_with(scale):
    mod, values = sits_tvm.prepare_qat(linear(), QuantSpec(group_size=32), params=W)
    return mod, {**values, "w.scale": np.full((32, 2), scale, "float32")}


def file(path, content):
    """`path`, with `content` in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def saved(path, name, edit):
    """A saved executable, one file of which `edit` changed."""
    sits_tvm.build(linear(), CPU, params=W).save(path)
    part = path / name
    part.write_bytes(edit(part.read_bytes()))
    return path


def cli(*arguments):
    """Raises what a command that fails prints."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        if main([*map(str, arguments), "--quiet"]):
            raise RuntimeError(printed.getvalue())


def checked(*args, **options):
    """Raises the errors that `check` finds."""
    found = sits_tvm.check(*args, **options)
    raise SitsError([diagnostic for diagnostic in found if diagnostic.severity == "error"])


def module_file(path):
    return file(path, tvm.ir.save_json(linear()))

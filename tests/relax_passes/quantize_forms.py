"""Ways to write quantization in Relax, and inputs on which different roundings differ."""

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op as R

ROWS, CHANNELS = 256, 8
X = ((ROWS, CHANNELS), "float32")
SCALE, SCALES = ((), "float32"), ((CHANNELS,), "float32")


def const(value, dtype="float32"):
    return relax.const(np.asarray(value), dtype)


class Builder:
    """Calls the ops of Relax, each in a binding of its own."""

    def __init__(self, bb):
        self.bb = bb

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.bb.emit(getattr(R, name)(*args, **kwargs))


def add_function(bb, name, spell, parameters):
    """`spell(builder, *variables)` as a function with one dataflow block."""
    variables = [
        relax.Var(f"a{i}", relax.TensorType(shape, dtype))
        for i, (shape, dtype) in enumerate(parameters)
    ]
    with bb.function(name, variables):
        with bb.dataflow():
            result = spell(Builder(bb), *variables)
            outputs = bb.emit_output(result)
        bb.emit_func_output(outputs)


def one_function(spell, *parameters):
    bb = relax.BlockBuilder()
    add_function(bb, "main", spell, parameters)
    return bb.get()


def op_names(func):
    """The Relax ops of a function, in order, without `relax.`."""
    return [
        binding.value.op.name.removeprefix("relax.")
        for block in func.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.Op)
    ]


def hard_inputs(scales, rng):
    """For each scale a column of ties, their neighbours, bounds, infinities and tiny numbers."""
    columns = []
    for scale in np.asarray(scales, "float32"):
        ties = ((np.arange(-20, 20) + 0.5).astype("float32") * scale).astype("float32")
        edges = np.arange(-20, 21).astype("float32") * scale
        near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
        odd = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1e-39, 3e38, -3e38, 2.0**31 * scale]
        column = np.concatenate([ties, edges, *near, np.asarray(odd, "float32")])
        fill = rng.standard_normal(ROWS - column.size).astype("float32") * 6 * scale
        columns.append(np.concatenate([column, fill]).astype("float32"))
    return np.stack(columns, axis=1)

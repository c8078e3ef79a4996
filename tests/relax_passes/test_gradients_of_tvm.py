"""Where TVM's rules are right, `relax.transform.Gradient` gives what it gave before the import."""

import subprocess
import sys

import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.relax import op as R

import sits_tvm  # noqa: F401, registers our rules

GRADIENT = """
import sys, tvm
from tvm import relax
mod = tvm.ir.load_json(sys.stdin.read())
print(tvm.ir.save_json(relax.transform.Gradient("main")(mod)))
"""


def model():
    """A loss of x, w and b, by ops that TVM's own tests differentiate."""
    bb, (m, n) = relax.BlockBuilder(), (4, 6)
    shapes = {"x": (m, n), "w": (n, n), "b": (n,)}
    args = [relax.Var(name, relax.TensorType(s, "float32")) for name, s in shapes.items()]
    x, w, b = args
    with bb.function("main", args):
        with bb.dataflow():
            y = bb.emit(R.add(R.matmul(x, R.permute_dims(w)), b))
            y = bb.emit(R.subtract(R.nn.relu(y), R.power(x, relax.const(3, "float32"))))
            y = bb.emit(R.divide(y, R.full_like(y, relax.const(2, "float32"))))
            y = bb.emit(R.reshape(R.concat([y, x], 0), (2, m, n)))
            y = bb.emit(R.multiply(R.mean(y, 0), R.expand_dims(b, 0)))
            loss = bb.emit_output(R.sum(y))
        bb.emit_func_output(loss)
    return bb.get()


def test_is_tvms_for_static_shapes():
    mod = model()
    command = [sys.executable, "-c", GRADIENT]
    text = tvm.ir.save_json(mod)
    made = subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout
    here = relax.transform.Gradient("main")(mod)
    assert_structural_equal(here, tvm.ir.load_json(made))

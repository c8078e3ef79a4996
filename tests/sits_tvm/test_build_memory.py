"""What a build and its result hold in memory, and where their inputs may lie."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_builds import CPU, G32, MATRIX, QUANT, run
from small_modules import one_function, restored
from tvm import relax, tirx

import sits_tvm
from sits_tvm import Config
from sits_tvm.pipeline import lower_to_vm


@pytest.mark.parametrize("target", [CPU, "cuda -arch=sm_90"])
def test_reshapes_are_views(target):
    """Scheduled before TVM looks for them, they would be copied by kernels of their own."""

    def make(bb, x):
        rows = bb.emit(relax.op.nn.softmax(x))
        return relax.op.nn.softmax(bb.emit(relax.op.reshape(rows, (8, 8, 64))))

    report = sits_tvm.build(one_function(make, MATRIX), target).report
    assert not [kernel.name for kernel in report.kernels if "reshape" in kernel.name]


def test_no_kernel_holds_a_whole_float_weight():
    """INT4 kernels read codes and allocate less than a weight; Relax plans no room for one."""
    rows = relax.TensorType((tirx.Var("s", "int64"), 256), "float32")
    weight = relax.TensorType((256, 1024), "float32")
    mod = one_function(lambda bb, x, w: relax.op.matmul(x, w), rows, weight, num_input=1)
    lowered, _ = sits_tvm.lower(
        mod, CPU, params={"a1": np.ones((256, 1024), "float32")}, config=QUANT
    )
    (kernel,) = (f for v, f in lowered.functions_items() if "int4" in v.name_hint)
    assert "uint32" in [str(p.ty.dtype) for p in kernel.params]
    assert 0 < max(allocated_elements(kernel)) <= 256 * 1024 // 8
    target = sits_tvm.parse_target(CPU)
    planned = lower_to_vm(target)(lowered)["main"].script()
    assert "alloc_storage" in planned or "alloc_tensor" in planned
    assert not re.findall(r"R\.shape\(\[(?:1048576|256, 1024|1024, 256)\]\)", planned)


def allocated_elements(kernel):
    """Elements of every buffer that a kernel allocates, as its script shows them."""
    allocations = re.findall(r"alloc_\w+\(\((.*)", kernel.script())
    return [math.prod(map(int, re.findall(r"int64\((\d+)\)", text))) for text in allocations]


PEAK = """
import gc
import numpy as np
import tvm
from tvm import relax
import sits_tvm

def now():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

def rss():  # the peak of this process; ru_maxrss starts at that of the one that started it
    with open("/proc/self/status") as status:
        return 1024 * int(next(line.split()[1] for line in status if line.startswith("VmHWM")))

def products(n, layers):
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, n), "float32"))
    weights = [relax.Var(f"w{i}", relax.TensorType((n, n), "float32")) for i in range(layers)]
    with bb.function("main", [x, *weights], attrs={"num_input": 1}):
        with bb.dataflow():
            y = x
            for weight in weights:
                y = bb.emit(relax.op.matmul(y, weight))
            y = bb.emit_output(y)
        bb.emit_func_output(y)
    return bb.get(), {f"w{i}": np.full((n, n), 0.5, "float32") for i in range(layers)}

def build(mod, params):
    quant = sits_tvm.QuantSpec(group_size=32, symmetric=False)
    config = sits_tvm.Config(quant=quant)
    return sits_tvm.build(mod, "llvm -mcpu=native", params=params, config=config)

build(*products(64, 8))  # code that stays loaded
mod, params = products(2048, 8)
gc.collect()
before = rss()
executable = build(mod, params)
print((rss() - before) / (8 * 2048 * 2048 * 4))

del params
vm = relax.VirtualMachine(executable, tvm.cpu())
gc.collect()
x = tvm.runtime.tensor(np.ones((1, 2048), "float32"))
before = now()
for _ in range(3):
    vm["main"](x, *executable.param_list)
print((now() - before) / (2048 * 2048 * 4))
"""


def test_peak_memory_of_build_and_run():
    """RSS rises by less than half of the float bytes, the inputs not counted; by less than one of
    the eight float weights when the INT4 build runs.

    In a process of its own: the peak of an earlier test would hide the rise.
    """
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    build, run = map(float, done.stdout.split())
    assert 0 < build < 0.5
    assert run < 0.5


@pytest.mark.parametrize("quant", [None, G32], ids=["float", "int4"])
@pytest.mark.parametrize("offset", [4, 16, 32])
def test_inputs_may_start_anywhere(rng, quant, offset):
    """NumPy aligns to 16 bytes; kernels compiled for 64 would end the process."""

    def make(bb, x, w):
        rows = bb.emit(relax.op.nn.softmax(bb.emit(relax.op.nn.relu(x))))
        return bb.emit(relax.op.nn.silu(bb.emit(relax.op.matmul(rows, w))))

    weight = rng.standard_normal((64, 64)).astype("float32")
    built = sits_tvm.build(
        one_function(make, MATRIX, MATRIX, num_input=1), CPU,
        params={"a1": weight}, config=Config(quant=quant),
    )  # fmt: skip
    memory = np.zeros(64 * 64 * 4 + 128, "uint8")
    start = -memory.ctypes.data % 64 + offset
    x = memory[start : start + 64 * 64 * 4].view("float32").reshape(64, 64)
    x[:] = rng.standard_normal(x.shape)
    rows = torch.from_numpy(x.copy()).double().relu().softmax(-1)
    want = torch.nn.functional.silu(rows @ restored(weight.T, quant).T)
    np.testing.assert_allclose(run(built, x), want, rtol=0, atol=2e-6)

"""Load and launch the kernels of a case by the CUDA driver."""

import ctypes
from pathlib import Path

import torch

HERE = Path(__file__).parent
DYNAMIC_SHARED_MEMORY = 8
"""The attribute of a function in the driver's API."""


class Driver:
    """Loads and launches cubins by the CUDA driver, in torch's context and stream."""

    def __init__(self):
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} fails with CUDA error {status}")

    def load(self, cubin):
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def function(self, module, kernel):
        found = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(found), module, kernel["name"].encode())
        if kernel["dynamic_smem"] > 48 << 10:
            size = kernel["dynamic_smem"]
            self.call("cuFuncSetAttribute", found, DYNAMIC_SHARED_MEMORY, size)
        return found

    def launch(self, function, kernel, arguments, rows):
        grid, block = extents(kernel["grid"], rows), extents(kernel["block"], rows)
        values = [argument(text, arguments, rows) for text in kernel["arguments"]]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = kernel["dynamic_smem"]
        self.call("cuLaunchKernel", function, *grid, *block, size, stream, pointers, None)


def extents(texts, rows):
    found = [evaluate(text, rows) for text in texts]
    return [*found, *[1] * (3 - len(found))]


def evaluate(text, rows):
    """An integer expression of the number of rows m, which fits in what it is cast to."""
    names = {"min": min, "max": max, "Cast": lambda dtype, value: value}
    return int(eval(text, {"__builtins__": {}, **names}, {"m": rows}))


def argument(text, arguments, rows):
    if text in arguments:
        return ctypes.c_void_p(arguments[text].data_ptr())
    return ctypes.c_int64(evaluate(text, rows))


class Case:
    """The kernels of a case, by range of rows."""

    def __init__(self, driver, case):
        self.driver, self.case = driver, case
        module = driver.load((HERE / f"{case['name']}.cubin").read_bytes())
        self.functions = {
            kernel["name"]: driver.function(module, kernel)
            for bucket in case["buckets"]
            for kernel in bucket["kernels"]
        }

    def run(self, arguments, rows):
        for kernel in bucket_of(self.case, rows)["kernels"]:
            self.driver.launch(self.functions[kernel["name"]], kernel, arguments, rows)


def outputs_of(case, rows, device):
    """The output, of NaN, and room for the sums of blocks along k and for terms of X."""
    split, n, dtype = (
        bucket_of(case, rows)["tile"]["split"],
        case["n"],
        getattr(torch, case["dtype"]),
    )
    return {
        case["output"]: torch.full((rows, n), torch.nan, dtype=dtype, device=device),
        "partial": torch.empty((split, rows, -(-n // 4) * 4), device=device),
        "buffer": torch.empty((rows, case["term_words"]), dtype=torch.int32, device=device),
    }


def bucket_of(case, rows):
    return next(b for b in case["buckets"] if b["most"] is None or rows <= b["most"])

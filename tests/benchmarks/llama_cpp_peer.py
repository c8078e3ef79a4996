"""llama.cpp's product with a Q4_0 weight, through the libraries of the package llama-cpp-python.

The package is optional: its wheel is built from source, and has to be for this CPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import logging
import weakref
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.int4_case import Case, Kernel, NotMeasured

BLOCK = 32
_F32, _Q4_0 = 0, 2  # enum ggml_type
_CONTEXT_BYTES = 4 << 20  # of the descriptions of tensors and of a graph


def llama_cpp_kernel(case: Case) -> Kernel:
    """Q4_0 in the order that the CPU backend repacks weights to; activations are int8 per block."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise NotMeasured("the package llama-cpp-python is not installed")
    if case.spec.group_size != BLOCK:
        raise NotMeasured(f"Q4_0 has groups of {BLOCK}")
    ggml = _Ggml()
    weights, nodes = (ggml.init(_Params(_CONTEXT_BYTES, None, True)) for _ in range(2))
    layers = [ggml.new_tensor_2d(weights, _Q4_0, case.k, case.n) for _ in range(case.layers)]
    x = ggml.new_tensor_2d(nodes, _F32, case.k, case.m)
    outputs = [ggml.mul_mat(nodes, layer, x) for layer in layers]
    graph = ggml.new_graph(nodes)
    for output in outputs:
        ggml.build_forward_expand(graph, output)
    backend = ggml.backend_cpu_init()
    ggml.backend_cpu_set_n_threads(backend, case.threads)
    buffers = [
        ggml.backend_alloc_ctx_tensors_from_buft(weights, ggml.repacking()),
        ggml.backend_alloc_ctx_tensors(nodes, backend),
    ]
    blocks = _q4_0(case)
    for layer in layers:
        ggml.backend_tensor_set(layer, blocks.ctypes.data, 0, blocks.nbytes)
    ggml.backend_tensor_set(x, case.x.ctypes.data, 0, case.x.nbytes)

    def run() -> None:
        ggml.backend_graph_compute(backend, graph)

    def result() -> np.ndarray:
        y = np.empty((case.m, case.n), "float32")
        ggml.backend_tensor_get(outputs[-1], y.ctypes.data, 0, y.nbytes)
        return y

    for free, objects in (
        (ggml.backend_buffer_free, buffers),
        (ggml.backend_free, [backend]),
        (ggml.free, [weights, nodes]),
    ):
        for each in objects:
            weakref.finalize(run, free, each)
    return Kernel(run, result, "int8", blocks.nbytes)


def _q4_0(case: Case) -> np.ndarray:
    """block_q4_0: a float16 scale, then 16 bytes; byte j has the codes j and j + 16."""
    codes = case.codes.reshape(case.n, -1, 2, BLOCK // 2)
    scale = case.scale.astype("float16")[:, :, None].view("uint8")
    return np.concatenate([scale, codes[:, :, 0] | codes[:, :, 1] << 4], axis=-1)


class _Params(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _Pointer(c_void_p):
    """Unlike a c_void_p, a result of this type does not become an int."""


_ARGUMENTS = {
    "new_tensor_2d": [_Pointer, c_int, c_int64, c_int64],
    "backend_tensor_set": [_Pointer, c_void_p, c_size_t, c_size_t],
    "backend_tensor_get": [_Pointer, c_void_p, c_size_t, c_size_t],
}


class _Ggml:
    """The functions of ggml, by their names without "ggml_"; they return pointers or nothing."""

    def __init__(self) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        folder = Path(llama_cpp.__file__).parent / "lib"
        names = "libggml-base.so", "libggml-cpu.so"
        self._libraries = [ctypes.CDLL(str(folder / name)) for name in names]

    def __getattr__(self, name: str) -> Any:
        library = next(lib for lib in self._libraries if hasattr(lib, f"ggml_{name}"))
        function = library[f"ggml_{name}"]
        function.restype, function.argtypes = _Pointer, _ARGUMENTS.get(name)
        return function

    def repacking(self) -> _Pointer:
        """The type of buffer whose weights are rearranged for this CPU, as loading a model does."""
        cpu = self.backend_cpu_reg()
        device = self.backend_reg_dev_get(cpu, c_size_t(0))
        address = self.backend_reg_get_proc_address(cpu, b"ggml_backend_dev_get_extra_bufts")
        found = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address.value)(device)
        name = self._libraries[0].ggml_backend_buft_name
        name.restype = c_char_p
        for buffer_type in itertools.takewhile(bool, found):
            if name(_Pointer(buffer_type)) == b"CPU_REPACK":
                return _Pointer(buffer_type)
        raise NotMeasured("this build of llama.cpp does not repack weights")

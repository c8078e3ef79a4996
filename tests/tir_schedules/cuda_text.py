"""Run the CUDA text that TVM emits for a PrimFunc on the CPU: compiled by g++, its threads fibers.

PTX does here what the PTX ISA says. Stricter than a GPU, a `CudaTextError` tells what a GPU may or
may not show: an access out of bounds, misaligned, or across threads without a barrier, a read of
what was not written or whose copy is under way, threads apart at a barrier or in a warp.
"""

import copy
import ctypes
import hashlib
import math
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from cuda_translate import kernels, translate
from tvm import tirx
from tvm.ir import IRModule, PrimType
from tvm.ir.instrument import pass_instrument
from tvm.sym import Analyzer

from sits_tvm._pass_context import with_instruments

_FOLDER = Path(__file__).parent
_FLAGS = [
    *("-std=c++20", "-O1", "-shared", "-fPIC"),
    *("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-ftrivial-auto-var-init=pattern", "-fsanitize=bounds", "-fno-sanitize-recover=bounds"),
    "-fno-gnu-unique",  # a library has variables of its own
    "-U_FORTIFY_SOURCE",  # it takes jumps between stacks for faults
]
_AXES = [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "xyz"]
_DYNAMIC = "tirx.use_dyn_shared_memory"


class CudaTextError(Exception):
    """The kernel does what a GPU need not bear."""


class GlobalArray(ctypes.Structure):
    """An array in global memory: `Array` of cuda_host_memory.h. Inputs may only be read."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("writable", ctypes.c_int64),
        ("writer", ctypes.c_void_p),
        ("writes", ctypes.c_void_p),
    ]

    def __init__(self, name, size, content=None):
        room = np.full(size + 256, 0xFF, "uint8")
        start = -room.ctypes.data % 256
        self.bytes, self.room = room[start : start + size], room
        self.writers, self.counts = np.zeros(size, "uint64"), np.zeros(size, "uint32")
        if content is not None:
            self.bytes[:] = np.ascontiguousarray(content).reshape(-1).view("uint8")
        pointers = [x.ctypes.data for x in (self.bytes, self.writers, self.counts)]
        super().__init__(name.encode(), pointers[0], size, content is None, *pointers[1:])


class Kernels:
    """The kernels of a CUDA text."""

    def __init__(self, text, seed=0):
        self.parameters, self.seed = kernels(text), seed
        launches = "\n".join(map(_launch_text, self.parameters, self.parameters.values()))
        self.library = ctypes.CDLL(_compiled(translate(text) + launches))

    def launch(self, name, arguments, extents, dynamic_bytes=0):
        """Arguments are `GlobalArray`s and integers; `extents` those of grid and block by tag."""
        arrays = [x for x in arguments if isinstance(x, GlobalArray)]
        scalars = [x for x in arguments if not isinstance(x, GlobalArray)]
        for array in arrays:
            array.writers[:] = 0
        function = self.library[f"launch_{name}"]
        function.restype = ctypes.c_char_p
        message = function(
            (ctypes.POINTER(GlobalArray) * len(arrays))(*map(ctypes.pointer, arrays)),
            (ctypes.c_int64 * len(scalars))(*scalars),
            (ctypes.c_int * 6)(*(extents.get(tag, 1) for tag in _AXES)),
            ctypes.c_int64(dynamic_bytes),
            ctypes.c_uint(self.seed),
        )
        if message is not None:
            raise CudaTextError(f"{name}, {message.decode()}")


class CudaText:
    """``run(*arrays)`` runs a scheduled PrimFunc; its last arguments are what it writes.

    Parameters
    ----------
    func : tirx.PrimFunc
    target : Target
    seed : int
        Of the order in which warps run.
    outputs : int
        How many arguments it writes.
    """

    def __init__(self, func, target, seed=0, outputs=1):
        self.outputs = outputs
        attributes = {"global_symbol": "main", "tirx.is_scheduled": True}
        capture = _Capture()
        with with_instruments(capture):
            built = tvm.compile(IRModule({"main": func.with_attr(attributes)}), target=target)
        (module,) = [module for module in built.mod.imports if module.kind == "cuda"]
        self.host, self.tags, self.text = capture.host, capture.tags, module.inspect_source()
        self.kernels = Kernels(self.text, seed)

    def edited(self, edit):
        """The same with another text, `edit(text)`."""
        other = copy.copy(self)
        other.text = edit(self.text)
        other.kernels = Kernels(other.text, self.kernels.seed)
        return other

    def __call__(self, *arrays):
        values, tensors = {}, {}
        inputs = len(arrays) - self.outputs
        for i, (buffer, array) in enumerate(zip(self.host.params, arrays, strict=True)):
            name, content = str(buffer.name), array if i < inputs else None
            tensors[buffer.data.args[0]] = GlobalArray(name, array.nbytes, content)
            for dim, extent in zip(buffer.shape, array.shape, strict=True):
                if isinstance(dim, tirx.Var):
                    values[dim] = tirx.const(extent, dim.ty.dtype)
        self._run(self.host.body, values, tensors)
        written = list(tensors.values())[inputs : len(arrays)]
        for out, array in zip(written, arrays[inputs:], strict=True):
            if not (out.counts == 1).all():
                raise CudaTextError(f"{out.name.decode()}: elements not written once")
            array.reshape(-1).view("uint8")[:] = out.bytes

    def _run(self, node, values, tensors):
        """A statement of the host, with the integers and the arrays that its variables are."""
        match type(node).__name__:
            case "SeqStmt":
                for one in node.seq:
                    self._run(one, values, tensors)
            case "Bind":
                values[node.var] = _value(node.value, values)
            case "IfThenElse":
                branch = node.then_case if _value(node.condition, values) else node.else_case
                if branch is not None:
                    self._run(branch, values, tensors)
            case "For":
                for i in range(int(_value(node.extent, values))):
                    values[node.loop_var] = tirx.const(i, node.loop_var.ty.dtype)
                    self._run(node.body, values, tensors)
            case "AttrStmt":
                self._run(node.body, values, tensors)
            case "AllocBuffer":
                self._allocate(node.buffer, values, tensors)
            case "DeclBuffer":
                tensors[node.buffer] = tensors[node.data.args[0]]
            case "Evaluate" if node.value.op.name == "tirx.call_ffi_kernel":
                self._launch(node.value.args, values, tensors)
            case kind:
                raise NotImplementedError(f"{kind} in the host function: {node}")

    def _allocate(self, buffer, values, tensors):
        """A workspace."""
        count = math.prod(int(_value(extent, values)) for extent in buffer.shape)
        size = count * tvm.DataType(str(buffer.dtype)).itemsize
        tensors[buffer] = GlobalArray(str(buffer.name), size)

    def _launch(self, call, values, tensors):
        name, tags = str(call[0].value), self.tags[str(call[0].value)]
        arguments = [
            int(_value(x, values)) if isinstance(x.ty, PrimType) else tensors[x.args[0]]
            for x in call[1 : len(call) - len(tags)]
        ]
        sizes = [int(_value(x, values)) for x in call[len(call) - len(tags) :]]
        extents = dict(zip(tags, sizes, strict=True))
        if not all(extents.get(tag, 1) for tag in _AXES):
            raise CudaTextError(f"{name}: no blocks to start")
        self.kernels.launch(name, arguments, extents, extents.pop(_DYNAMIC, 0))


def _value(expr, values):
    """The constant that `expr` is."""
    found = tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)), order="post")
    found = Analyzer().simplify(found)
    if not isinstance(found, tirx.IntImm):
        raise NotImplementedError(f"in the host function: {expr}")
    return found


@pass_instrument
class _Capture:
    """The host function, and the launch parameters of kernels by name, before it gets its ABI."""

    def run_after_pass(self, mod, info):
        if info.name == "tirx.SplitHostDevice":
            self.host, self.tags = mod["main"], {}
            for variable, func in mod.functions.items():
                tags = func.attrs.get("tirx.kernel_launch_params", [])
                self.tags[variable.name_hint] = [str(tag) for tag in tags]


def _launch_text(name, parameters):
    """``launch_<name>``, which calls the kernel in every thread."""
    arguments, counts = [], {True: 0, False: 0}
    for kind, _ in parameters:
        is_tensor = kind.endswith("*")
        place = f"{'arrays' if is_tensor else 'scalars'}[{counts[is_tensor]}]"
        counts[is_tensor] += 1
        cast = f"Ptr<{kind[:-1]}>" if is_tensor else f"static_cast<{kind}>"
        arguments.append(f"{cast}({place})")
    return f"""
extern "C" const char* launch_{name}(host::Array** the_arrays, const int64_t* the_scalars,
                                     const int* extents, int64_t dynamic_bytes, unsigned seed) {{
  static host::Array** arrays;
  static const int64_t* scalars;
  arrays = the_arrays, scalars = the_scalars;
  return host::launch(extents, dynamic_bytes, seed, [] {{ {name}({", ".join(arguments)}); }});
}}"""


def _compiled(text):
    """The path of a library, which is made once for a text."""
    headers = sorted(_FOLDER.glob("cuda_host*.h"))
    digest = _digest([path.read_text() for path in headers] + _FLAGS)
    folder = Path(tempfile.gettempdir()) / f"cuda_text-{os.getuid()}" / digest
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _compile(["-xc++-header", str(headers[0])], folder / "cuda_host.h.gch")
    text = f'#include "cuda_host.h"\n#line 1 "kernel.cu"\n{text}'
    arguments = [f"-I{folder}", f"-I{_FOLDER}", "-xc++", "-"]
    return _compile(arguments, folder / f"{_digest([text])}.so", text)


def _digest(texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _compile(arguments, made, text=""):
    """The path `made`, which is written at once: other processes may want it, too."""
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=made.parent) as room:
            new = Path(room) / made.name
            command = ["g++", *_FLAGS, *arguments, "-o", str(new)]
            run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            if run.returncode:
                raise RuntimeError(f"g++ refuses the text:\n{run.stderr[:4000]}")
            new.replace(made)
    return str(made)

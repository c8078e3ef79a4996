"""A lowered CUDA kernel as Python text, for the `Block` of gpu_block, which does the work.

Every expression is a scalar or an array with an element per thread. What is not known here raises
NotImplementedError.
"""

import math
import re

import numpy as np
from tvm.ir import PrimType

_BINARY = {
    "Add": "({} + {})",
    "Sub": "({} - {})",
    "Mul": "({} * {})",
    "FloorDiv": "({} // {})",
    "FloorMod": "({} % {})",
    "EQ": "({} == {})",
    "NE": "({} != {})",
    "LT": "({} < {})",
    "LE": "({} <= {})",
    "GT": "({} > {})",
    "GE": "({} >= {})",
    "And": "np.logical_and({}, {})",
    "Or": "np.logical_or({}, {})",
}
_CHOICES = {
    ("Min", False): "np.minimum",
    ("Max", False): "np.maximum",
    ("Min", True): "np.fmin",  # CUDA's min and max of a number and NaN are the number
    ("Max", True): "np.fmax",
}
_PTX_DESTINATIONS = {"mma": 4, "ldmatrix": 4, "cvt": 1, "ld": 4}


class Translator:
    """`text` defines ``run(block, *params)``; `extents` has the text of each thread's extent."""

    def __init__(self, device):
        self.names, self.extents, self.lines = {}, {}, []
        self.params = [self.name(param) for param in device.params]
        self.statement(device.body, 1)
        self.text = "\n".join([f"def run(block, {', '.join(self.params)}):", *self.lines])

    def name(self, var):
        plain = re.sub(r"\W", "_", str(var.name))
        return self.names.setdefault(var, f"{plain}_{len(self.names)}")

    def emit(self, depth, line):
        self.lines.append("    " * depth + line)

    def statement(self, node, depth):
        kind = type(node).__name__
        method = getattr(self, f"_{kind}", None)
        if method is None:
            raise NotImplementedError(f"{kind}: {node}")
        method(node, depth)

    def _SeqStmt(self, node, depth):
        for one in node.seq:
            self.statement(one, depth)

    def _DeclBuffer(self, node, depth):
        self.emit(depth, f"{self.name(node.buffer)} = {self.expr(node.data)}")

    def _AllocBuffer(self, node, depth):
        kind = {"local": "registers", "shared.dyn": "shared_memory"}[node.buffer.scope()]
        count = math.prod(int(n) for n in node.buffer.shape)
        self.emit(depth, f"{self.name(node.buffer)} = block.{kind}({count}, '{node.buffer.dtype}')")

    def _AttrStmt(self, node, depth):
        if node.attr_key == "thread_extent":
            tag = str(node.node.thread_tag)
            self.extents[tag] = self.expr(node.value)
            self.emit(depth, f"{self.name(node.node.var)} = block.index['{tag}']")
        self.statement(node.body, depth)

    def _Bind(self, node, depth):
        self.emit(depth, f"{self.name(node.var)} = {self.expr(node.value)}")

    def _BufferStore(self, node, depth):
        (index,) = node.indices
        where = f"{self.name(node.buffer)}, {self.expr(index)}"
        self.emit(depth, f"block.store({where}, {self.expr(node.value)})")

    def _Evaluate(self, node, depth):
        self.emit(depth, self.expr(node.value))

    def _For(self, node, depth):
        bounds = f"{self.expr(node.min)}, {self.expr(node.extent)}"
        self.emit(depth, f"for {self.name(node.loop_var)} in block.loop({bounds}):")
        self.statement(node.body, depth + 1)

    def _IfThenElse(self, node, depth):
        if node.else_case is not None:
            raise NotImplementedError("else")
        self.emit(depth, f"for _ in block.where({self.expr(node.condition)}):")
        self.statement(node.then_case, depth + 1)

    def expr(self, node):
        kind = type(node).__name__
        if kind in _BINARY:
            return _BINARY[kind].format(self.expr(node.a), self.expr(node.b))
        method = getattr(self, f"_expr_{kind}", None)
        if method is None:
            raise NotImplementedError(f"{kind}: {node}")
        return method(node)

    def _choice(self, node):
        function = _CHOICES[type(node).__name__, "float" in str(node.ty.dtype)]
        return f"{function}({self.expr(node.a)}, {self.expr(node.b)})"

    _expr_Min = _expr_Max = _choice

    def _expr_Div(self, node):
        if "float" not in str(node.ty.dtype):
            raise NotImplementedError(f"truncated division: {node}")
        return f"({self.expr(node.a)} / {self.expr(node.b)})"

    def _expr_Var(self, node):
        return self.name(node)

    def _expr_IntImm(self, node):
        return str(int(node.value))

    def _expr_FloatImm(self, node):
        return f"float('{node.value}')"

    def _expr_StringImm(self, node):
        return repr(str(node.value))

    def _expr_Cast(self, node):
        return f"block.cast({self.expr(node.value)}, '{node.ty.dtype}')"

    def _expr_Not(self, node):
        return f"np.logical_not({self.expr(node.a)})"

    def _expr_Select(self, node):
        parts = (node.condition, node.true_value, node.false_value)
        return f"np.where({', '.join(map(self.expr, parts))})"

    def _expr_TensorLoad(self, node):
        return f"block.load{self.place(node)}"

    def place(self, load):
        """A buffer and an index in it: what an address, or a destination of PTX, is here."""
        (index,) = load.indices
        return f"({self.name(load.source)}, {self.expr(index)})"

    def _expr_Call(self, node):
        name = node.op.name.partition(".")[2]
        if name == "address_of":
            return self.place(node.args[0])
        if name == "if_then_else":
            condition, *values = map(self.expr, node.args)
            return f"block.choose({condition}, lambda: {values[0]}, lambda: {values[1]})"
        name = name.replace(".", "_")
        first = name.removeprefix("ptx_").partition("_")[0]
        count = _PTX_DESTINATIONS.get(first, 0) if name.startswith("ptx_") else 0
        destinations = [self.place(argument) for argument in node.args[:count]]
        values = [self.expr(argument) for argument in node.args[count:]]
        return f"block.{name}({', '.join([*destinations, *values])})"


class HostArguments(Translator):
    """`values` of the scalars that the host passes to its one kernel, by parameter of `device`."""

    def __init__(self, host, device, symbols):
        self.symbols, self.bound, self.calls = symbols, {}, []
        self._collect(host.body)
        ((_, *arguments),) = self.calls
        self.values = {
            str(param.name): eval(self.expr(argument), {"np": np})
            for param, argument in zip(device.params, arguments, strict=False)
            if isinstance(param.ty, PrimType)
        }

    def _collect(self, node):
        kind = type(node).__name__
        if kind == "Bind":
            self.bound[node.var] = node.value
        elif kind == "Evaluate" and node.value.op.name == "tirx.call_ffi_kernel":
            self.calls.append(node.value.args)
        for one in node.seq if kind == "SeqStmt" else [getattr(node, "body", None)]:
            if one is not None:
                self._collect(one)

    def _expr_Var(self, node):
        name = str(node.name)
        return str(self.symbols[name]) if name in self.symbols else self.expr(self.bound[node])

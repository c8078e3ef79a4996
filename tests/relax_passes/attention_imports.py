"""Spellings as Relax modules: a whole table is exported at once, then taken apart.

An export costs half a second whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from attention_meaning import Spelling
from torch import Tensor, nn
from tvm import IRModule, relax
from tvm.relax.frontend.torch import from_exported_program

from sits_tvm import from_torch


@dataclass(frozen=True)
class Part:
    """One spelling or its twin, with its places among the inputs and outputs of the whole."""

    spelling: Spelling
    is_twin: bool
    module: nn.Module
    inputs: slice
    outputs: slice


class Together(nn.Module):
    """All spellings of a table, and their twins, as one module that returns a flat tuple."""

    def __init__(self, table: Sequence[Spelling], *, twins: bool = True) -> None:
        super().__init__()
        self.table, self.parts = table, list(_parts(table, twins))
        self.inner = nn.ModuleList(part.module for part in self.parts)

    def inputs(self, lengths: tuple[int, int] | None = None) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return tuple(x for s in self.table for x in s.inputs(*(lengths or s.lengths)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(y for p in self.parts for y in _flat(p.module(*inputs[p.inputs])))


def _parts(table: Sequence[Spelling], twins: bool) -> Iterator[Part]:
    start = end = 0
    for spelling in table:
        inputs = spelling.inputs(*spelling.lengths)
        taken = slice(start, start + len(inputs))
        start = taken.stop
        modules = [spelling.module(), *([spelling.twin_module()] if twins else [])]
        for is_twin, module in enumerate(modules):
            count = len(_flat(module(*inputs)))
            yield Part(spelling, bool(is_twin), module, taken, slice(end, end + count))
            end += count


def _flat(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def by_from_torch(together: Together) -> IRModule:
    return from_torch(together, together.inputs())[0]


def by_from_torch_dynamic(together: Together) -> IRModule:
    shapes = (tuple(d for s in together.table for d in s.dynamic_shapes()[0]),)
    return from_torch(together, together.inputs((6, 7)), dynamic_shapes=shapes)[0]


def by_tvm(together: Together) -> IRModule:
    """TVM's own importer, with torch's decomposition of every op."""
    program = torch.export.export(together, together.inputs())
    return from_exported_program(program, custom_convert_map={"amax.default": _amax})


def _amax(node: torch.fx.Node, importer: Any) -> relax.Expr:
    x, axes, *keepdim = node.args
    return importer.block_builder.emit(relax.op.max(importer.env[x], axes, *keepdim))


def take(mod: IRModule, part: Part) -> IRModule:
    """The part of `mod` that computes one spelling."""
    func = mod["main"]
    bindings = [b for block in func.body.blocks for b in block.bindings]
    values = {b.var: b.value for b in bindings}
    fields = list(_whole(func, values).fields)[part.outputs]
    needed = _needed(fields, values)
    bb = relax.BlockBuilder()
    with bb.function("main", list(func.params)[part.inputs], attrs=_bounds(func)):
        with bb.dataflow():
            for binding in bindings:
                if binding.var in needed:
                    bb.emit_normalized(binding)
            out = bb.emit_output(relax.Tuple(fields))
        bb.emit_func_output(out)
    return bb.get()


def _whole(func: relax.Function, values: dict) -> relax.Tuple:
    result = func.body.body
    while isinstance(result, relax.Var):
        result = values[result]
    return result


def _needed(wanted: list, values: dict) -> set:
    stack: list = [*wanted]
    needed: set = set()
    while stack:
        var = stack.pop()
        if isinstance(var, relax.Var) and var not in needed:
            needed.add(var)
            stack += list(relax.analysis.free_vars(values[var])) if var in values else []
    return needed


def _bounds(func: relax.Function) -> dict[str, Any]:
    names = ("tir_var_lower_bound", "tir_var_upper_bound")
    return {name: func.attrs[name] for name in names if func.attrs and name in func.attrs}


def run(executable: relax.VMExecutable, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs in torch, bfloat16 too."""
    vm = relax.VirtualMachine(executable, tvm.cpu())
    outputs = vm["main"](*map(_to_tvm, inputs))
    return [torch.from_dlpack(y).clone() for y in outputs]


def _to_tvm(x: Tensor) -> tvm.runtime.Tensor:
    return tvm.runtime.from_dlpack(x.contiguous())

"""How large the graph of a model is: operators as imported and rewritten, kernels after fusion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tvm
from tvm import IRModule, relax
from tvm.target import Target

import sits_tvm
from sits_tvm import Config, Report, parse_target
from sits_tvm.pipeline import run_graph_passes
from tests.sits_tvm.tiny_models import tiny

CPU = "llvm -mcpu=native"


@dataclass(frozen=True)
class GraphSize:
    """Calls of operators after the graph passes, and of kernels after fusion."""

    operators: int
    kernels: int

    def __sub__(self, other: GraphSize) -> GraphSize:
        return GraphSize(self.operators - other.operators, self.kernels - other.kernels)


class Llama(torch.nn.Module):
    """A tiny Llama: four heads in two groups; ids (b, s) -> logits."""

    def __init__(self, layers: int, implementation: str) -> None:
        super().__init__()
        self.model = tiny("Llama", attention=implementation, num_hidden_layers=layers)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def exported(layers: int, implementation: str, *, dynamic: bool) -> torch.export.ExportedProgram:
    ids = torch.arange(18).reshape(2, 9)
    shapes = ({1: torch.export.Dim("s", min=2, max=64)},) if dynamic else None
    model = Llama(layers, implementation)
    return torch.export.export(model, (ids,), dynamic_shapes=shapes, strict=False)


def our_size(program: torch.export.ExportedProgram, attention: str) -> GraphSize:
    """With the attention passes "exact" or "off"."""
    mod, params = sits_tvm.from_torch(program)
    config, target = Config(attention=attention), parse_target(CPU)
    graph = run_graph_passes(mod, target, config, Report(), dict(params))
    kernels, _ = sits_tvm.lower(mod, target, params=params, config=config)
    return GraphSize(_operators(graph), _kernels(kernels))


def tvm_size(program: torch.export.ExportedProgram) -> GraphSize:
    """By TVM's importer and its passes up to fusion."""
    from tvm.relax.frontend.torch import from_exported_program

    mod = from_exported_program(program)
    with Target("llvm"):
        fused = relax.get_pipeline("zero")(mod)
    return GraphSize(_operators(mod), _kernels(fused))


def _operators(mod: IRModule) -> int:
    return len(_calls(mod))


def _kernels(mod: IRModule) -> int:
    return sum(call.op == tvm.ir.Op.get("relax.call_tir") for call in _calls(mod))


def _calls(mod: IRModule) -> list[relax.Call]:
    values = relax.analysis.get_var2val(mod["main"]).values()
    return [value for value in values if isinstance(value, relax.Call)]

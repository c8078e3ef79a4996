"""Nodes of an exported graph: their source line, the keywords a converter reads, the gradients
they stop; the names that torch can write."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..diagnostics import Diagnostic, raise_errors

_DETACH_IN_PLACE = torch.ops.aten.detach_.default
_CONSTANT = torch.ops.aten.lift_fresh_copy.default  # of torch.tensor(…)


class WatchedCall:
    """A node whose keywords know whether they were read."""

    def __init__(self, node: torch.fx.Node) -> None:
        self._node, self.kwargs = node, _Keywords(node.kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


class _Keywords(dict):
    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        super().__init__(kwargs)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def check_names(program: torch.export.ExportedProgram) -> None:
    """Raise SitsError for attributes that are keywords: torch writes graphs as Python."""
    names = (*program.state_dict, *program.constants)
    found = [(n, part) for n in names for part in n.split(".") if keyword.iskeyword(part)]
    raise_errors(
        [
            Diagnostic.error(
                "attribute-name",
                f"`{name}`: torch cannot decompose a program with an attribute `{part}`, a keyword",
                help=f"call it `{part}_` in the module",
            )
            for name, part in found
        ]
    )


def source_line(node: torch.fx.Node) -> str:
    """The innermost line outside torch that made `node`, as ``file:line: code``."""
    frames = [f for f in (node.meta.get("stack_trace") or "").split("File ") if f.strip()]
    if not frames:
        return node.format_node() or node.name
    inside = f'"{Path(torch.__file__).parent}'
    users = [frame for frame in frames if not frame.startswith(inside)]
    where, _, code = (users or frames)[-1].partition("\n")
    file, _, line = where.partition(", line ")
    first = (code.strip().splitlines() or [""])[0].strip()
    return f"{file.strip(chr(34))}:{line.split(',')[0]}: {first}"


@contextmanager
def stopped_gradients(program: torch.export.ExportedProgram) -> Iterator[None]:
    """Detach what `run_decompositions` would let gradients through: ``detach_`` and the results of
    regions under ``torch.no_grad()``. The graph is afterwards as it was."""
    added = [_detached(program.graph, node) for node in _without_gradient(program.graph)]
    try:
        yield
    finally:
        for node in reversed(added):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)


def _without_gradient(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            found += node.users
        elif node.target is _DETACH_IN_PLACE and node.args[0].target is not _CONSTANT:
            found.append(node)
    return found


def _detached(graph: torch.fx.Graph, result: torch.fx.Node) -> torch.fx.Node:
    with graph.inserting_after(result):
        node = graph.call_function(torch.ops.aten.detach.default, (result,))
    result.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    node.meta = dict(result.meta)
    return node

"""Nodes of an exported graph: their source line, and which keywords a converter reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


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

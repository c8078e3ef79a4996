"""Read TVM's JSON of a module, which TVM itself reads only if nobody has damaged it.

`load_json` follows a reference to a later object, or to the object itself, into memory that is not
there, and ends the process. What TVM writes refers to earlier objects only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tvm.ir import load_json
from tvm_ffi import core

_NEVER_NULL = {"op", "args", "values", "fields", "bindings", "blocks", "params", "body", "var"}
_CONTAINERS = ("ffi.Array", "ffi.Map", "ffi.List", "ffi.Dict")


def read_json_module(path: Path) -> Any:
    """What `tvm.ir.save_json` wrote to a file.

    Raises
    ------
    ValueError
        If an object refers to none before it; what else is wrong, as Python and TVM raise it.
    """
    text = path.read_text()
    graph = json.loads(text)
    nodes = graph.get("nodes", []) if isinstance(graph, dict) else []
    for number, node in enumerate(nodes):
        for name, value in _references(node):
            if type(value) is not int or not 0 <= value < number:
                raise ValueError(f"object {number}, {node['type']}: {name} is {value!r}")
            if name in _NEVER_NULL - _optional(node["type"]) and _is_null(nodes, value):
                raise ValueError(f"object {number}, {node['type']}: {name} is null")
    return load_json(text)


def _is_null(nodes: list[dict[str, Any]], number: int) -> bool:
    """Whether an object, or an element of an array, is none."""
    node = nodes[number]
    if node["type"] == "ffi.Array":
        return any(nodes[element]["type"] == "None" for element in node["data"])
    return bool(node["type"] == "None")


def _references(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields that are numbers of other objects."""
    data, kind = node.get("data"), node["type"]
    if isinstance(data, list) and kind in _CONTAINERS:
        yield from ((f"element {i}", value) for i, value in enumerate(data))
    elif isinstance(data, dict):
        numbers = _numbers(kind)
        yield from (
            (name, value)
            for name, value in data.items()
            if name not in numbers and type(value) is int
        )


def _numbers(kind: str) -> frozenset[str]:
    """The fields of a type that hold a number themselves."""
    return _fields(kind, "int")


def _optional(kind: str) -> frozenset[str]:
    """The fields of a type that may be null, as `params` of a function of unknown type."""
    return _fields(kind, "Optional")


@cache
def _fields(kind: str, schema: str) -> frozenset[str]:
    names = set()
    info: Any = core._lookup_or_register_type_info_from_type_key(kind)
    while info is not None:
        for field in info.fields:
            if json.loads(field.metadata.get("type_schema", "{}")).get("type") == schema:
                names.add(field.name)
        info = info.parent_type_info
    return frozenset(names)

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

_CONTAINERS = ("ffi.Array", "ffi.Map", "ffi.List", "ffi.Dict")
_NULLABLE = ("Optional", "Any", "ir.Span", "ir.Attrs", "ir.Type")
"""Types of fields that may be null: TVM does not say so of the last three."""


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
            if _is_null(nodes, value, _schema(node["type"]).get(name, {})):
                raise ValueError(f"object {number}, {node['type']}: {name} is null")
    return load_json(text)


def _is_null(nodes: list[dict[str, Any]], number: int, schema: dict[str, Any]) -> bool:
    """Whether a field, or an element of an array in it, is null and may not be."""
    node = nodes[number]
    if node["type"] == "ffi.Array" and schema.get("args"):
        return any(_is_null(nodes, element, schema["args"][0]) for element in node["data"])
    return node["type"] == "None" and schema.get("type", "Any") not in _NULLABLE


def _references(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields that are numbers of other objects."""
    data, kind = node.get("data"), node["type"]
    if isinstance(data, list) and kind in _CONTAINERS:
        yield from ((f"element {i}", value) for i, value in enumerate(data))
    elif isinstance(data, dict):
        schema = _schema(kind)
        yield from (
            (name, value)
            for name, value in data.items()
            if schema.get(name, {}).get("type") != "int" and type(value) is int
        )


@cache
def _schema(kind: str) -> dict[str, dict[str, Any]]:
    """The type of each field of a type, as TVM registers it."""
    found: dict[str, dict[str, Any]] = {}
    info: Any = core._lookup_or_register_type_info_from_type_key(kind)
    while info is not None:
        for field in info.fields:
            found.setdefault(field.name, json.loads(field.metadata.get("type_schema", "{}")))
        info = info.parent_type_info
    return found

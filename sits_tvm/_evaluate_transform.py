"""Evaluate the transform functions that passes make of weights, in NumPy, one weight at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, Op
from tvm.runtime import Tensor

from relax_passes.op import pack_weight
from relax_passes.op.int4 import layout_of
from relax_passes.packed_weights.packed_function import SOURCE_NAMES
from tir_schedules.int4_format.packing import Parts, pack, stack

from .diagnostics import Diagnostic

_LOG = logging.getLogger(__name__)
_CPU = 1
_RESHAPE = Op.get("relax.reshape")

Array: TypeAlias = Tensor | np.ndarray
Packed: TypeAlias = tuple[Tensor, ...]
Cache: TypeAlias = dict[tuple[Any, str], Packed]
"""Parts by what they are made of, weights by name, and the attributes of the call."""


def evaluate_transform(
    transform: relax.Function,
    params: Mapping[str, Array],
    cache: Cache,
    found: list[Diagnostic],
) -> list[Array | None]:
    """What a transform function returns; `cache` keeps packed weights for the other functions."""
    sources = [str(name) for name in transform.attrs[SOURCE_NAMES]]
    names: dict[relax.Var, str] = {}
    values: dict[relax.Var, Any] = {}
    for binding in transform.body.blocks[0].bindings:
        variable, value = binding.var, binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value == transform.params[0]:
            names[variable] = sources[value.index]
            values[variable] = params[names[variable]]
        elif isinstance(value, relax.TupleGetItem):
            parts = values[value.tuple_value]
            values[variable] = parts[value.index] if parts else None
        elif isinstance(value, relax.Call) and value.op == _RESHAPE:
            names[variable] = f"{names[value.args[0]]} {variable.ty.shape}"
            shape = [int(extent) for extent in variable.ty.shape]
            values[variable] = as_numpy(values[value.args[0]]).reshape(shape)
        elif isinstance(value, relax.Call):
            key = tuple(names.get(arg, arg) for arg in value.args), str(value.attrs)
            if key not in cache:
                arrays = [a.value if isinstance(a, GenericConst) else values[a] for a in value.args]
                cache[key] = _pack(value, [names.get(a, "") for a in value.args], arrays, found)
            values[variable] = cache[key]
        else:
            return [values[field] for field in value.fields]
    raise AssertionError("a transform function ends in a tuple")


def _pack(call: relax.Call, names: list[str], arrays: list[Any], found: list[Diagnostic]) -> Packed:
    """One weight at a time: those that a `quantize_weight` stacks have their rows one by one."""
    name, packer = str(call.op.name), _PACKERS[str(call.op.name)]
    stacks = name == "relax.sits.quantize_weight"
    weights = [(n, [a]) for n, a in zip(names, arrays, strict=True)]
    if not stacks:  # a scale, where the weight is a constant
        weights = [(next(filter(None, names)), arrays)]
    parts: list[Parts] = []
    for weight, given in weights:
        _LOG.info("packing %s", weight)
        try:
            parts.append(packer(call, [as_numpy(array) for array in given]))
        except ValueError as error:
            found.append(not_quantizable(weight, error))
    if len(parts) < len(weights):
        return ()
    return tuple(tvm.runtime.tensor(part) for part in stack(parts))


def _quantize_weight(call: relax.Call, arrays: list[np.ndarray]) -> Parts:
    layout, (weight,) = layout_of(call), arrays
    return pack(weight.T if call.attrs["transposed"] else weight, layout.spec, layout.order)


_PACKERS = {
    "relax.sits.quantize_weight": _quantize_weight,
    "relax.sits.pack_weight": pack_weight.evaluate,
}


def as_numpy(value: Array) -> np.ndarray:
    """The same memory where it is the host's."""
    if isinstance(value, np.ndarray):
        return value
    on_cpu = value.device.dlpack_device_type() == _CPU
    known = str(value.dtype) != "bfloat16"  # to NumPy
    return np.from_dlpack(value) if on_cpu and known else value.numpy()


def not_quantizable(weight: str, error: ValueError) -> Diagnostic:
    """What the packing of a weight raised, as an error."""
    help_ = f'repair it, or leave it in float: Config(skip=("{weight}",))'
    return Diagnostic.error("weight-not-quantizable", f"`{weight}`: {error}", help=help_)

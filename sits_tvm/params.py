"""The parameters of a module: checked against it, and packed as its transform functions say."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.runtime import Tensor

from relax_passes.packed_weights.packed_function import TRANSFORM_SUFFIX

from ._evaluate_transform import Array, Cache, as_numpy, evaluate_transform
from .diagnostics import Diagnostic, SitsError, raise_errors


def as_arrays(params: Mapping[str, Any]) -> dict[str, Array]:
    """TVM tensors and NumPy arrays as they are, others (such as torch's) through DLPack.

    Raises
    ------
    SitsError
        With every name that is no str and every value that is no dense tensor.
    """
    if not isinstance(params, Mapping):
        message = f"params is a {type(params).__name__}, not a mapping of names to tensors"
        help_ = 'write params={"weight": array, …}, as the front ends return it'
        raise SitsError([Diagnostic.error("params-type", message, help=help_)])
    arrays: dict[str, Array] = {}
    found = []
    for name, value in params.items():
        try:
            arrays[_name(name)] = _array(value)
        except (AttributeError, BufferError, RuntimeError, TypeError) as error:
            kind = type(value).__name__
            message = f"parameter `{name}` is a {kind}, not a dense tensor or an array: {error}"
            help_ = "give a NumPy array, or a tensor of TVM or PyTorch"
            found.append(Diagnostic.error("params-type", message, help=help_))
    raise_errors(found)
    return arrays


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"its name is a {type(name).__name__}, not a str")
    return name


def _array(value: Any) -> Array:
    return value if isinstance(value, Tensor | np.ndarray) else _from_dlpack(_plain(value))


def public_functions(mod: IRModule) -> dict[str, relax.Function]:
    """The Relax functions that the executable exports, by name."""
    return {
        gvar.name_hint: func
        for gvar, func in mod.functions_items()
        if isinstance(func, relax.Function) and "global_symbol" in (func.attrs or {})
    }


def weight_names(func: relax.Function) -> list[str]:
    """Names of the arguments after ``num_input``; empty without that attribute."""
    inputs = int((func.attrs or {}).get("num_input", len(func.params)))
    return [argument.name for argument in func.params[inputs:]]


def bind_names(mod: IRModule, params: Mapping[str, Array]) -> IRModule:
    """Set ``num_input`` where a function has none and takes arguments named in `params`.

    Raises
    ------
    SitsError
        With every parameter that is missing, unknown, out of order, or of the wrong type.
    """
    out = mod.clone()
    found: list[Diagnostic] = []
    taken: set[str] = set()
    for name, func in public_functions(mod).items():
        if "num_input" not in (func.attrs or {}):
            named = [argument.name in params for argument in func.params]
            inputs = named.index(True) if any(named) else len(named)
            if not all(named[inputs:]):
                found.append(_out_of_order(name, func, params))
                taken.update(argument.name for argument in func.params)
                continue
            func = func.with_attr("num_input", inputs)
            out[name] = func
        names = weight_names(func)
        taken.update(names)
        arguments = func.params[len(func.params) - len(names) :]
        found += [d for a in arguments for d in mismatch(name, a, params.get(a.name))]
    found += [_unknown(name, taken) for name in params if name not in taken]
    raise_errors(found)
    return out


def pack_params(mod: IRModule, params: Mapping[str, Array]) -> tuple[IRModule, dict[str, Tensor]]:
    """Run the transform functions of `mod` on `params`, one weight at a time, and drop them.

    Weights that stay in float are the tensors of `params` themselves.

    Raises
    ------
    SitsError
        With every weight that holds NaN or infinite values, or whose scale overflows, and every
        name that functions have for different values.
    """
    out, functions = mod.clone(), public_functions(mod)
    values: dict[str, Any] = {}
    cache: Cache = {}
    found: list[Diagnostic] = []
    for name, func in functions.items():
        if name.endswith(TRANSFORM_SUFFIX):
            continue
        transform = functions.get(name + TRANSFORM_SUFFIX)
        if transform is None:
            results = [params[weight] for weight in weight_names(func)]
        else:
            results = evaluate_transform(transform, params, cache, found)
            del out[name + TRANSFORM_SUFFIX]
        for weight, result in zip(weight_names(func), results, strict=True):
            if not _same(values.setdefault(weight, result), result):
                message = f"`{weight}` of {name} is another tensor than that of an earlier function"
                found.append(
                    Diagnostic.error("name-taken", message, function=name, help="rename it")
                )
    raise_errors(found)
    return out, {name: _as_tensor(value) for name, value in values.items()}


def _same(a: Array | None, b: Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(as_numpy(a), as_numpy(b)))


def mismatch(
    function: str, argument: relax.Var, value: Array | None, kind: str = "parameter"
) -> list[Diagnostic]:
    """An error unless `value` has the dtype, and where it is static the shape, of `argument`."""
    expected = argument.ty
    if value is None:
        message = f"no parameter `{argument.name}` is given; {function} takes it as {expected}"
        help_ = "give it in params, or no params at all: weights are then packed when it runs"
        return [Diagnostic.error("params-missing", message, function=function, help=help_)]
    if not isinstance(expected, relax.TensorType):
        message = f"`{argument.name}` of {function} is {expected}, not a tensor"
        help_ = "pass it as an input, before the parameters"
        return [Diagnostic.error("params-mismatch", message, function=function, help=help_)]
    static = isinstance(expected.shape, relax.ShapeExpr)
    dims = list(expected.shape) if static else [None] * expected.ndim
    shape = [int(d) if isinstance(d, tirx.IntImm) else None for d in dims]
    same_shape = len(shape) == len(value.shape) and all(
        want in (None, have) for want, have in zip(shape, value.shape, strict=True)
    )
    if same_shape and str(value.dtype) == str(expected.dtype):
        return []
    message = (
        f"{kind} `{argument.name}` has shape {tuple(value.shape)} and dtype {value.dtype}; "
        f"{function} takes it as {expected}"
    )
    help_ = "convert it to that type, or import the model again with its own parameters"
    return [Diagnostic.error("params-mismatch", message, function=function, help=help_)]


def _unknown(name: str, taken: set[str]) -> Diagnostic:
    near = get_close_matches(name, taken, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"the names are {', '.join(sorted(taken)[:8])}"
    return Diagnostic.error("params-unknown", f"no function takes a parameter `{name}`", help=hint)


def _out_of_order(name: str, func: relax.Function, params: Mapping[str, Array]) -> Diagnostic:
    order = ", ".join(f"{a.name} (parameter)" if a.name in params else a.name for a in func.params)
    return Diagnostic.error(
        "params-before-inputs",
        f"the arguments of {name} are {order}",
        function=name,
        help="put the inputs first, then the parameters",
    )


def _plain(value: Any) -> Any:
    """A torch tensor without its graph and its pending negation, which DLPack would drop."""
    for name in ("detach", "resolve_conj", "resolve_neg"):
        value = getattr(value, name)() if hasattr(value, name) else value
    return value


def _from_dlpack(value: Any) -> Array:
    """The same memory; TVM wants it aligned to 64 bytes, NumPy lacks bfloat16."""
    try:
        return tvm.runtime.from_dlpack(value)
    except RuntimeError:
        if str(value.dtype).endswith("bfloat16"):
            return tvm.runtime.from_dlpack(value.contiguous().clone())
        return np.from_dlpack(value)


def _as_tensor(value: Array) -> Tensor:
    return value if isinstance(value, Tensor) else tvm.runtime.tensor(np.asarray(value, order="C"))

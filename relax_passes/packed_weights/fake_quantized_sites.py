"""Find where a Relax function multiplies by a weight that it fake-quantizes, or whose codes it
dequantizes, or looks rows of one up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import relax
from tvm.ir import BaseFunc, GenericConst, Op

from ..op._affine import FLOATS, attributes_of
from .weight_sites import (
    MATMUL,
    TAKE,
    bindings_of,
    reason_against,
    trace_weight,
    weight_name,
    weights_of,
)

FAKE_QUANTIZE = Op.get("relax.sits.fake_quantize")
DEQUANTIZE = Op.get("relax.sits.dequantize")
_QUANTIZERS = (FAKE_QUANTIZE, DEQUANTIZE)
_CODES = ("int8", "uint8")
_GRADIENT = Op.get("relax.sits.fake_quantize_grad")
_RESHAPE = Op.get("relax.reshape")


@dataclass(frozen=True)
class FakeQuantizedSite:
    """A call that reads ``fake_quantize(W, scale[, zero_point])`` of a weight W[n, k], or
    ``dequantize`` of its codes.

    `sources` are the arguments or constants W, scale and zero point, of which the last two may be
    reshaped before `quantizer` takes them; `transposed` tells that W is stored as (k, n). `reason`
    is why it can't be packed, as (code, message), or None.
    """

    binding: relax.Var
    call: relax.Call
    kind: str  # "matmul" or "embedding"
    quantizer: relax.Call
    sources: tuple[relax.Expr, ...]
    name: str
    transposed: bool
    reason: tuple[str, str] | None


def find_fake_quantized_sites(func: relax.Function) -> Iterator[FakeQuantizedSite]:
    """Every matmul and axis-0 take in `func` that reads a quantized argument or constant."""
    bound = {binding.var: binding.value for binding in bindings_of(func.body)}
    for variable, value in bound.items():
        if not isinstance(value, relax.Call) or value.op not in (MATMUL, TAKE):
            continue
        taken = value.op == TAKE
        if taken and value.attrs["axis"] != 0:
            continue
        read, flipped, through = trace_weight(value.args[0 if taken else 1], bound, _QUANTIZERS)
        quantizer = bound.get(read)
        if not (isinstance(quantizer, relax.Call) and quantizer.op in _QUANTIZERS):
            continue
        transposed = flipped if taken else not flipped
        site = _site(func, variable, quantizer, transposed, through, bound)
        if site is not None:
            yield site


def part_prefixes(sites: Sequence[FakeQuantizedSite]) -> dict[relax.Var, str]:
    """By binding the prefix of the names of the packed parts, of all functions of a module.

    It is that of the weight, ``<weight>.transposed`` for the reads as (k, n) of one that is read as
    (n, k), too; a weight that is quantized in several ways has a number after the second and on.
    """
    as_stored = {site.name for site in sites if not site.transposed}
    ways: dict[str, list[tuple[object, ...]]] = {}
    prefixes: dict[relax.Var, str] = {}
    for site in sites:
        turned = site.transposed and site.name in as_stored
        prefix = f"{site.name}.transposed" if turned else site.name
        found, way = ways.setdefault(prefix, []), _way(site)
        if way not in found:
            found.append(way)
        count = found.index(way) + 1
        prefixes[site.binding] = prefix if count == 1 else f"{prefix}.{count}"
    return prefixes


def _way(site: FakeQuantizedSite) -> tuple[object, ...]:
    """How a weight is quantized; functions share weights, scales and zero points by name."""
    parts = (
        arg.name if isinstance(arg, relax.Var) else tvm_ffi.structural_hash(arg)
        for arg in site.sources
    )
    return (*parts, str(attributes_of(site.quantizer)))


def fake_quantizes_weight(func: BaseFunc, *, is_called: bool) -> bool:
    """Whether `func` fake-quantizes a constant or a weight: any argument, where others call it."""
    if not isinstance(func, relax.Function):
        return False
    arguments = set(func.params) if is_called else weights_of(func)
    bound = {binding.var: binding.value for binding in bindings_of(func.body)}
    calls = (v for v in bound.values() if isinstance(v, relax.Call) and v.op == FAKE_QUANTIZE)
    sources = (trace_weight(call.args[0], bound)[0] for call in calls)
    return any(isinstance(source, GenericConst) or source in arguments for source in sources)


def trained_names(func: relax.Function) -> set[str]:
    """Names of the arguments of which `func` computes the gradient through a fake quantize."""
    return {
        arg.name
        for binding in bindings_of(func.body)
        if isinstance(binding.value, relax.Call) and binding.value.op == _GRADIENT
        for arg in binding.value.args
        if arg in set(func.params)
    }


def _site(
    func: relax.Function,
    variable: relax.Var,
    quantizer: relax.Call,
    transposed: bool,
    through: tuple[str, ...],
    bound: dict[relax.Var, relax.Expr],
) -> FakeQuantizedSite | None:
    source, turned, before = trace_weight(quantizer.args[0], bound)
    if source is None:
        return None  # an activation
    weights = weights_of(func)
    call, quantizer = bound[variable], _symmetric(quantizer, bound)
    kind = "embedding" if call.op == TAKE else "matmul"
    sources = (source, *(_same_elements(arg, bound) for arg in quantizer.args[1:]))
    dtypes = _CODES if quantizer.op == DEQUANTIZE else FLOATS
    reason = reason_against(call, kind, source, weights, (*before, *through), dtypes)
    if reason is None and (turned or not _same_codes(source, quantizer.args[0])):
        reason = "weight-is-computed", "the weight is transposed or cast before it is quantized"
    if reason is None:
        reason = _reason(quantizer, sources, weights)
    name = weight_name(source, variable)
    return FakeQuantizedSite(variable, call, kind, quantizer, sources, name, transposed, reason)


def _symmetric(quantizer: relax.Call, bound: dict[relax.Var, relax.Expr]) -> relax.Call:
    """The call without a zero point, where that is the constant 0 and codes are signed."""
    zero = _same_elements(quantizer.args[-1], bound)
    is_zero = isinstance(zero, GenericConst) and not zero.value.numpy().any()
    if len(quantizer.args) < 3 or not is_zero or not quantizer.attrs["signed"]:
        return quantizer
    call = relax.Call(quantizer.op, quantizer.args[:-1], quantizer.attrs)
    return relax.BlockBuilder().normalize(call)


def _same_elements(expr: relax.Expr, bound: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """What `expr` is another name of, or a reshape."""
    while isinstance(expr, relax.Var) and expr in bound:
        value = bound[expr]
        if isinstance(value, relax.Call) and value.op == _RESHAPE:
            value = value.args[0]
        if not isinstance(value, relax.Var | GenericConst):
            return expr
        expr = value
    return expr


def _same_codes(source: relax.Expr, cast: relax.Expr) -> bool:
    """A cast of half precision to float32 keeps every value."""
    before, after = str(source.ty.dtype), str(cast.ty.dtype)
    return before == after or (before in ("float16", "bfloat16") and after == "float32")


def _reason(
    quantizer: relax.Call, sources: tuple[relax.Expr, ...], weights: set[relax.Var]
) -> tuple[str, str] | None:
    names = ("scale", "zero point")[: len(sources) - 1]
    for what, arg, source in zip(names, quantizer.args[1:], sources[1:], strict=True):
        if not (isinstance(source, GenericConst) or source in weights):
            return "scale-is-computed", (
                f"its {what}, {arg}, is neither a weight nor a constant "
                "(convert_qat computes the scales of a trained model once)"
            )
    return None

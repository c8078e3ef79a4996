"""What the quantization ops share: attributes, their checks, and calls of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from tvm import relax
from tvm.ir import Op

from sits_tvm.diagnostics import Diagnostic, SitsError
from tir_schedules.quantization.affine import AffineFormat
from tir_schedules.quantization.group_sums import SUMS_ATTR

FLOATS: tuple[str, ...] = ("float16", "bfloat16", "float32")
INTEGERS: tuple[str, ...] = ("int8", "uint8", "int32", "int64")
# The attributes of every op here, with their defaults.
FORMAT: dict[str, Any] = {f.name: f.default for f in fields(AffineFormat)}
_OPAQUE = 8  # relax.op_pattern
_SCALE_DTYPES = (None, *FLOATS)
_CLIP_MASKS = ("rounded", "strict")


def affine_attributes(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The checked attributes of a call of `name`; raises SitsError with everything wrong."""
    problems = list(attribute_problems(values))
    if problems:
        found = [f"{name}: {problem}" for problem in problems]
        help_ = f"help(relax_passes.op.{name.rpartition('.')[2]}) lists the attributes"
        raise SitsError([Diagnostic.error("quantize-attribute", f, help=help_) for f in found])
    return values


def format_of(call: relax.Call) -> AffineFormat:
    """How a call of one of these ops quantizes."""
    return AffineFormat.from_attributes(call.attrs)


def attributes_of(call: relax.Call) -> dict[str, Any]:
    """The attributes of a call that say how it quantizes."""
    form = format_of(call)
    return {name: getattr(form, name) for name in FORMAT}


def call_of(name: str, args: Sequence[relax.Expr], attributes: dict[str, Any]) -> relax.Call:
    """R.sits.<name>(*args, **attributes), unchecked."""
    return relax.Call(Op.get(f"relax.sits.{name}"), list(args), attributes)


def validate(call: relax.Call) -> None:
    """FValidate: attributes that did not come through our functions."""
    missing = [name for name in FORMAT if call.attrs is None or name not in call.attrs]
    problems = [f"no attribute {', '.join(missing)}"] if missing else []
    if not missing:
        problems += attribute_problems(dict(call.attrs.items()))
    raise_problems(call, problems)


def raise_problems(call: relax.Call, problems: list[str]) -> None:
    """ValueError with all of them: what TVM passes on unchanged from type inference."""
    if problems:
        raise ValueError(f"{call.op.name.replace('relax.', 'R.', 1)}: " + "; ".join(problems))


def attribute_problems(values: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the fields of an `AffineFormat`, and with `out_dtype` if there."""
    bits, group_size = values["bits"], values["group_size"]
    if not _is_int(bits) or not 2 <= bits <= 8:
        yield f"bits={bits!r}: write a width of 2 to 8"
    if not _is_int(values["axis"]):
        yield f"axis={values['axis']!r} is not an integer"
    if group_size is not None and (
        not _is_int(group_size) or (group_size < 1 and group_size != -1)
    ):
        yield (
            f"group_size={group_size!r}: write a number of elements, -1 for one group along the "
            "axis, or None for a scale per tensor or channel"
        )
    for name in ("signed", "narrow_range"):
        if not isinstance(values[name], bool):
            yield f"{name}={values[name]!r} is not True or False"
    if values["clip_mask"] not in _CLIP_MASKS:
        yield f"clip_mask={values['clip_mask']!r} is not 'rounded' or 'strict'"
    if values["scale_dtype"] not in _SCALE_DTYPES:
        yield f"scale_dtype={values['scale_dtype']!r} is not None, {', '.join(FLOATS)}"
    if values.get("out_dtype") not in (None, *FLOATS):
        yield f"out_dtype={values['out_dtype']!r} is not one of {', '.join(FLOATS)}"


def with_dtype(ty: relax.TensorType, dtype: str) -> relax.TensorType:
    """`ty` with other elements."""
    if ty.shape is None:
        return relax.TensorType(dtype=dtype, ndim=ty.ndim, vdevice=ty.vdevice)
    return relax.TensorType(ty.shape, dtype, ty.vdevice)


def legalize_with(kernel: Callable) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """FLegalize by a TE function kernel(format, *arguments), which fusion may join."""

    def legalize(bb: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return call_kernel(bb, call, partial(kernel, format_of(call)), *call.args)

    return legalize


def call_kernel(
    bb: relax.BlockBuilder, call: relax.Call, kernel: Callable, *args: Any, **attributes: Any
) -> relax.Expr:
    """A call of the PrimFunc of a TE function, named after the op."""
    name = call.op.name.rsplit(".", 1)[1]
    return bb.call_te(kernel, *args, primfunc_name_hint=name, primfunc_attrs=attributes)


def call_sums(
    bb: relax.BlockBuilder, call: relax.Call, kernel: Callable, **attributes: Any
) -> relax.Expr:
    """The same for a kernel with sums over groups, which fusion leaves alone for its schedule."""
    attributes = {"op_pattern": _OPAQUE, SUMS_ATTR: True, **attributes}
    return call_kernel(bb, call, partial(kernel, format_of(call)), *call.args, **attributes)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""What the quantization ops share: attributes, their checks, and the types of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import Op

from sits_tvm.diagnostics import Diagnostic, SitsError
from tir_schedules.affine import AffineFormat
from tir_schedules.group_sums import SUMS_ATTR

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
        raise SitsError([Diagnostic.error("quantize-attribute", f"{name}: {p}") for p in problems])
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


def tensor_problems(
    call: relax.Call,
    bb: relax.BlockBuilder,
    args: Sequence[relax.Expr],
    data: dict[str, tuple[str, ...]],
) -> Iterator[str]:
    """What is wrong with `args`: those named in `data` (with their dtypes), scale, zero point.

    The last of `data` is the tensor that is quantized; the others have its shape.
    """
    expected = {**data, "scale": FLOATS, "zero_point": (*INTEGERS, *FLOATS)}
    if len(args) not in (len(expected) - 1, len(expected)):
        names = ", ".join([*data, "scale"])
        yield f"takes {names} and at most a zero_point, found {len(args)} arguments"
        return
    wrong = [
        f"{name} is {arg.ty}, expected a tensor of {', '.join(dtypes)}"
        for (name, dtypes), arg in zip(expected.items(), args, strict=False)
        if not _is_tensor(arg.ty, dtypes)
    ]
    if wrong:
        yield from wrong
        return
    x, *parameters = args[len(data) - 1 :]
    for name, arg in list(zip(data, args, strict=False))[:-1]:
        if not same_shape(arg.ty, x.ty):
            yield f"{name} {show(arg.ty)} does not have the shape of x {show(x.ty)}"
    yield from _parameter_problems(format_of(call), x.ty, *(p.ty for p in parameters))
    yield from _constant_problems(format_of(call), *(constant_value(bb, p) for p in parameters))


def _parameter_problems(
    form: AffineFormat,
    x: relax.TensorType,
    scale: relax.TensorType,
    zero_point: relax.TensorType | None = None,
) -> Iterator[str]:
    if zero_point is not None and not same_shape(zero_point, scale):
        yield f"zero_point {show(zero_point)} does not have the shape of scale {show(scale)}"
    if form.group_size is None and scale.ndim == 0:
        return
    if x.ndim == 0:
        yield (
            "x has rank 0, so scale must have rank 0 and group_size be None; "
            f"found scale {show(scale)}, group_size={form.group_size}"
        )
    elif x.ndim > 0 and not -x.ndim <= form.axis < x.ndim:
        yield f"axis={form.axis} is out of range for x {show(x)}"
    elif form.group_size is None and scale.ndim > 1:
        yield (
            f"scale {show(scale)} has rank {scale.ndim}; without group_size it is one number, or "
            f"one per index of axis {form.axis} of x {show(x)}"
        )
    else:
        yield from _extent_problems(form, x, scale)


def _extent_problems(
    form: AffineFormat, x: relax.TensorType, scale: relax.TensorType
) -> Iterator[str]:
    shape, found = known_shape(x), known_shape(scale)
    if form.group_size is not None and -1 not in (x.ndim, scale.ndim) and x.ndim != scale.ndim:
        yield f"with group_size scale has the rank of x: x {show(x)}, scale {show(scale)}"
    elif shape is not None and found is not None:
        expected = form.param_shape(shape, len(found))
        analyzer = tvm.sym.Analyzer()
        if not all(analyzer.can_prove_equal(a, b) for a, b in zip(expected, found, strict=True)):
            group = "" if form.group_size is None else f" and group_size={form.group_size}"
            yield (
                f"scale {show(scale)} is not {show_shape(expected)}, which x {show(x)} with "
                f"axis={form.axis}{group} needs"
            )


def _constant_problems(
    form: AffineFormat, scale: np.ndarray | None, zero_point: np.ndarray | None = None
) -> Iterator[str]:
    if scale is not None:
        stored = (scale if form.scale_dtype is None else scale.astype(form.scale_dtype)).astype(
            "float32"
        )
        bad = ~(np.isfinite(stored) & (stored > 0))
        if bad.any():
            rounded = "" if form.scale_dtype is None else f" in {form.scale_dtype}"
            yield f"scales must be positive and finite{rounded}, {_examples(scale, bad)}"
    if zero_point is not None:
        rounded_points = np.rint(zero_point.astype("float64"))
        bad = ~((rounded_points >= form.lo) & (rounded_points <= form.hi))
        if bad.any():
            yield f"zero points must be codes {form.lo}…{form.hi}, {_examples(zero_point, bad)}"


def _examples(values: np.ndarray, bad: np.ndarray) -> str:
    shown = ", ".join(str(value) for value in values[bad].ravel()[:3])
    return f"found {shown}{', …' if bad.sum() > 3 else ''} ({bad.sum()} of {values.size})"


def constant_value(bb: relax.BlockBuilder, expr: relax.Expr) -> np.ndarray | None:
    """The value of a constant, or of a variable bound to one."""
    if isinstance(expr, relax.Var):
        expr = bb.lookup_binding(expr)
    value = expr.value if isinstance(expr, tvm.ir.GenericConst) else None
    return value.numpy() if isinstance(value, tvm.runtime.Tensor) else None


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


def known_shape(ty: relax.TensorType) -> list | None:
    """The dimensions, or None where the shape is not known."""
    return list(ty.shape) if isinstance(ty.shape, relax.ShapeExpr) else None


def same_shape(a: relax.TensorType, b: relax.TensorType) -> bool:
    """False where the shapes differ, or are not provably equal."""
    left, right = known_shape(a), known_shape(b)
    if left is None or right is None:
        return -1 in (a.ndim, b.ndim) or a.ndim == b.ndim
    prove = tvm.sym.Analyzer().can_prove_equal
    return len(left) == len(right) and all(map(prove, left, right))


def show(ty: relax.TensorType) -> str:
    """A shape as a user writes it: (4, n)."""
    shape = known_shape(ty)
    return "(?)" if shape is None else show_shape(shape)


def show_shape(shape: list) -> str:
    inner = ", ".join(str(int(d)) if isinstance(d, int | tirx.IntImm) else str(d) for d in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def _is_tensor(ty: tvm.ir.Type, dtypes: tuple[str, ...]) -> bool:
    return isinstance(ty, relax.TensorType) and str(ty.dtype) in dtypes


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

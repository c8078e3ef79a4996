"""What is wrong with the arguments of a quantization op: dtypes, shapes, values of constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tvm
from tvm import relax, tirx

from tir_schedules.quantization.affine import AffineFormat

from ._affine import FLOATS, INTEGERS, format_of


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
    constants = [constant_value(bb, p) for p in parameters]
    yield from _constant_problems(format_of(call), *constants, divides="q" not in data)


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
    form: AffineFormat,
    scale: np.ndarray | None,
    zero_point: np.ndarray | None = None,
    *,
    divides: bool,
) -> Iterator[str]:
    """`divides` tells that elements are divided by scales; codes have any that are finite."""
    if scale is not None:
        stored = (scale if form.scale_dtype is None else scale.astype(form.scale_dtype)).astype(
            "float32"
        )
        bad = ~(np.isfinite(stored) & ((stored > 0) | (not divides)))
        if bad.any():
            rounded = "" if form.scale_dtype is None else f" in {form.scale_dtype}"
            wanted = "positive and finite" if divides else "finite"
            yield f"scales must be {wanted}{rounded}, {_examples(scale, bad)}"
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

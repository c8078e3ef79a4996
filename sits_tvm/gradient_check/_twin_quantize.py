"""Quantization in the torch twin: the surrogate that straight-through gradients differentiate.

y = (clamp(ste_round(x / s) + z', lo, hi) - z') · s, with the clamp differentiated exactly on the
code before clamping. Codes are those of float32 arithmetic at the recorded point: divide, round
half to even, then add the zero point (PyTorch's fake_quantize; LSQ, Esser et al. 2020, eq. 1-3).
All values are float64, so autograd gives first and second derivatives of exactly this surrogate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ._twin_arithmetic import Rule, _torch


@dataclass(frozen=True)
class Grid:
    """The attributes of a quantize op, read for the twin."""

    lo: int
    hi: int
    axis: int
    group_size: int | None
    strict: bool = False
    scale_dtype: str | None = None

    @classmethod
    def of(cls, call: relax.Call) -> Grid:
        """Of `relax.sits.fake_quantize`, `quantize`, `dequantize`, or TVM's own two."""
        name, attrs = call.op.name, call.attrs
        if not name.startswith("relax.sits."):
            dtype = attrs.out_dtype if name == "relax.quantize" else call.args[0].ty.dtype
            return cls(*_dtype_range(str(dtype)), int(attrs.axis), None)
        values = {key: attrs.get(key, None) for key in ("group_size", "clip_mask", "scale_dtype")}
        bits, signed = int(attrs["bits"]), bool(attrs["signed"])
        lo = (-(2 ** (bits - 1)) if signed else 0) + int(bool(attrs["narrow_range"]))
        group = values["group_size"]
        dtype = values["scale_dtype"]
        return cls(
            lo, 2 ** (bits - signed) - 1, int(attrs["axis"]),
            None if group is None else int(group),
            values["clip_mask"] == "strict", None if dtype is None else str(dtype),
        )  # fmt: skip

    def spread(self, parameter: Any, shape: Sequence[int]) -> Any:
        """A scale or zero point with one value per element of an x of `shape`."""
        if parameter.ndim == 0 or (self.group_size is None and parameter.numel() == 1):
            return parameter.reshape(()).expand(*shape)
        axis = self.axis % len(shape)
        if self.group_size is None:
            return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        if self.group_size == -1:
            return parameter.expand(*shape)
        repeated = parameter.repeat_interleave(self.group_size, dim=axis)
        return repeated.narrow(axis, 0, shape[axis])

    def stored(self, scale: Any) -> Any:
        """The scale as it is deployed, straight through the rounding."""
        if self.scale_dtype is None:
            return scale
        return _straight_through(scale, scale.detach().to(getattr(_torch(), self.scale_dtype)))

    def zero_point(self, args: Sequence[Any], at: Sequence[Any]) -> tuple[Any, Any]:
        """(z' for autograd, z' as a number)."""
        if len(args) < 3:
            zero = _torch().zeros((), dtype=_torch().float64)
            return zero, zero
        rounded = at[2].double().round().clamp(self.lo, self.hi)
        return _straight_through(args[2].double(), rounded), rounded


def _straight_through(x: Any, value: Any) -> Any:
    """`value`, with the derivative of x."""
    return x + (value.to(x.dtype) - x.detach())


def _codes(grid: Grid, args: Sequence[Any], at: Sequence[Any]) -> tuple[Any, Any, Any]:
    """(code before clamping, mask of the elements that keep their gradient, z') as numbers."""
    shape = at[0].shape
    scale = grid.spread(grid.stored(at[1].detach()), shape).float()
    ratio = at[0].detach().float() / scale
    zero = grid.spread(grid.zero_point(args, at)[1], shape)
    code = ratio.round().double() + zero
    if grid.strict:
        inside = ratio.double() + zero
        return code, (inside > grid.lo) & (inside < grid.hi), zero
    return code, (code >= grid.lo) & (code <= grid.hi), zero


def _quantize(call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    grid = Grid.of(call)
    code, mask, number = _codes(grid, args, at)
    shape = args[0].shape
    scale = grid.spread(grid.stored(args[1]), shape)
    zero = grid.spread(grid.zero_point(args, at)[0], shape)
    inside = _straight_through(args[0] / scale, code - number) + zero
    return _torch().where(mask, inside, code.clamp(grid.lo, grid.hi))


def _dequantize(call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    grid, shape = Grid.of(call), args[0].shape
    zero = grid.spread(grid.zero_point(args, at)[0], shape)
    return (args[0].double() - zero) * grid.spread(grid.stored(args[1]), shape)


def _fake_quantize(call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    return _dequantize(call, [_quantize(call, args, at), *args[1:]], at)


def clipped(call: relax.Call, args: Sequence[Any], at: Sequence[Any]) -> Any:
    """True where an element of x lost its gradient to clipping."""
    return ~_codes(Grid.of(call), args, at)[1]


def _absmax_scale(call: relax.Call, _args: list[Any], at: list[Any]) -> Any:
    """Scales (and zero points) that span each group, constants to training, in float32."""
    torch, attrs, x = _torch(), call.attrs, at[0].detach().float()
    axis, size = int(attrs["axis"]) % x.ndim, int(attrs["group_size"])
    size = x.shape[axis] if size == -1 else size
    groups = torch.stack([part.amax(axis) for part in x.clamp(min=0).split(size, axis)], axis)
    lows = torch.stack([part.amin(axis) for part in x.clamp(max=0).split(size, axis)], axis)
    levels = 2 ** int(attrs["bits"]) - 1
    symmetric = bool(attrs["symmetric"])
    reach = torch.maximum(groups, -lows) if symmetric else groups - lows
    scale = torch.where(reach == 0, 1.0, reach / (levels // 2 if symmetric else levels))
    dtype = getattr(torch, str(attrs["scale_dtype"]))
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    scale = scale.to(dtype).float().clamp(min=smallest)
    if symmetric:
        return scale.double()
    return [scale.double(), (-lows / scale).round().clamp(max=levels).long()]


def _rounding(name: str) -> Rule:
    return lambda _call, args, at: _straight_through(args[0], getattr(_torch(), name)(at[0]))


def _clip(_call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    x, low, high = args
    return _torch().where(at[0] < low, low, _torch().where(at[0] > high, high, x))


def _astype(call: relax.Call, args: list[Any], at: list[Any]) -> Any:
    """Straight through a cast to an integer, which is the surrogate of a fake quantization."""
    x, dtype = args[0], str(call.ty.dtype)
    if dtype == "bool":
        return at[0] != 0
    if "float" in dtype:
        return x.double()
    if x.dtype == _torch().float64:
        return _straight_through(x, at[0].trunc())
    return x.long()


def _dtype_range(dtype: str) -> tuple[int, int]:
    bits = int("".join(c for c in dtype if c.isdigit()))
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


QUANTIZERS = ("sits.fake_quantize", "sits.quantize", "quantize")
RULES: dict[str, Rule] = {
    "sits.fake_quantize": _fake_quantize,
    "sits.quantize": _quantize,
    "sits.dequantize": _dequantize,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "sits.absmax_scale": _absmax_scale,
    "round": _rounding("round"),
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding("trunc"),
    "clip": _clip,
    "astype": _astype,
}

"""Products, norms, losses and pools of the torch twin. Rules as in `_twin_arithmetic`."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ._twin_arithmetic import Rule, _torch


def _matmul(_call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return _torch().matmul(args[0], args[1])


def _softmax(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return _torch().softmax(args[0], dim=int(call.attrs.axis))


def _log_softmax(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return _torch().log_softmax(args[0], dim=int(call.attrs.axis))


def _layer_norm(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    x, axes = args[0], [int(a) for a in call.attrs.axes]
    centred = x - x.mean(dim=axes, keepdim=True)
    variance = centred.square().mean(dim=axes, keepdim=True)
    out = centred * _torch().rsqrt(variance + float(call.attrs.epsilon))
    out = out * args[1] if call.attrs.scale else out
    return out + args[2] if call.attrs.center else out


def _rms_norm(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    x, axes = args[0], [int(a) for a in call.attrs.axes]
    power = x.square().mean(dim=axes, keepdim=True)
    return x * _torch().rsqrt(power + float(call.attrs.epsilon)) * args[1]


def _cross_entropy(_call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    """−Σ predictions · labels, over the batch for a matrix; Relax normalizes nothing here."""
    total = -(args[0] * args[1]).sum()
    return total if args[0].ndim == 1 else total / args[0].shape[0]


def _nll_loss(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    return _torch().nn.functional.nll_loss(
        args[0],
        args[1].long(),
        args[2] if len(args) > 2 else None,
        ignore_index=int(call.attrs.ignore_index),
        reduction=str(call.attrs.reduction),
    )


def _conv2d(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    attrs = call.attrs
    _require_layout(attrs.data_layout, "NCHW")
    _require_layout(attrs.kernel_layout, "OIHW")
    return _torch().nn.functional.conv2d(
        _padded(args[0], attrs.padding, 0.0),
        args[1],
        stride=_ints(attrs.strides),
        dilation=_ints(attrs.dilation),
        groups=int(attrs.groups),
    )


def _max_pool2d(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    attrs = call.attrs
    _require_layout(attrs.layout, "NCHW")
    return _torch().nn.functional.max_pool2d(
        _padded(args[0], attrs.padding, float("-inf")),
        _ints(attrs.pool_size),
        stride=_ints(attrs.strides),
        dilation=_ints(attrs.dilation),
        ceil_mode=bool(attrs.ceil_mode),
    )


def _avg_pool2d(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    attrs = call.attrs
    _require_layout(attrs.layout, "NCHW")
    padding = _ints(attrs.padding)
    if padding[:2] != padding[2:]:
        raise NotImplementedError("avg_pool2d with unequal padding")
    return _torch().nn.functional.avg_pool2d(
        args[0],
        _ints(attrs.pool_size),
        stride=_ints(attrs.strides),
        padding=padding[:2],
        ceil_mode=bool(attrs.ceil_mode),
        count_include_pad=bool(attrs.count_include_pad),
    )


def _adaptive_avg_pool2d(call: relax.Call, args: list[Any], _at: list[Any]) -> Any:
    _require_layout(call.attrs.layout, "NCHW")
    size = call.attrs.output_size
    size = args[0].shape[2:] if size is None else _ints(size)
    return _torch().nn.functional.adaptive_avg_pool2d(args[0], size)


def _padded(x: Any, padding: Any, value: float) -> Any:
    top, left, bottom, right = _ints(padding)
    return _torch().nn.functional.pad(x, (left, right, top, bottom), value=value)


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


def _require_layout(found: object, wanted: str) -> None:
    if str(found) != wanted:
        raise NotImplementedError(f"layout {found}; the twin knows {wanted}")


RULES: dict[str, Rule] = {
    "matmul": _matmul,
    "nn.softmax": _softmax,
    "nn.log_softmax": _log_softmax,
    "nn.layer_norm": _layer_norm,
    "nn.rms_norm": _rms_norm,
    "nn.cross_entropy_with_logits": _cross_entropy,
    "nn.nll_loss": _nll_loss,
    "nn.conv2d": _conv2d,
    "nn.max_pool2d": _max_pool2d,
    "nn.avg_pool2d": _avg_pool2d,
    "nn.adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "grad.no_grad": lambda _call, args, _at: args[0].detach(),
}

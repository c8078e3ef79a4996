"""What each parameter of a function is for: read from the forward IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from relax_passes._adjoint import bindings_of, used_vars

from .twin import QUANTIZERS, Site, sites_of

_TRANSPARENT = {
    f"relax.{name}"
    for name in [
        "sits.fake_quantize",
        "sits.quantize",
        "sits.dequantize",
        "quantize",
        "dequantize",
        "permute_dims",
        "reshape",
        "astype",
        "expand_dims",
        "squeeze",
        "broadcast_to",
        "flatten",
    ]
}
_INDEXED = {"relax.take": 1, "relax.gather_elements": 1, "relax.nn.nll_loss": 1}


@dataclass(frozen=True)
class Role:
    """A parameter's use.

    Attributes
    ----------
    operator : str
        The op that computes with it, such as "matmul"; "scale of matmul" and "zero point of
        matmul" for the parameters of a quantize op in front of it.
    part : int or None
        Which argument of a quantize op it is: 0 the tensor, 1 the scale, 2 the zero point.
    site : int or None
        Index of that quantize op among `sites_of` the function.
    below : int or None
        For an index: it is less than this.
    """

    operator: str
    part: int | None = None
    site: int | None = None
    below: int | None = None


def roles_of(func: relax.Function) -> dict[str, Role]:
    """The role of each parameter of `func`, by name."""
    bindings = bindings_of(func)
    readers: dict[relax.Var, list[tuple[relax.VarBinding, int]]] = {}
    for binding in bindings:
        args = binding.value.args if isinstance(binding.value, relax.Call) else [binding.value]
        for position, arg in enumerate(args):
            for var in used_vars(arg):
                readers.setdefault(var, []).append((binding, position))
    index = {site.binding.var: i for i, site in enumerate(sites_of(bindings))}
    return {param.name: _role(param, readers, index) for param in func.params}


def quantize_sites(sites: Sequence[Site]) -> list[tuple[int, Site]]:
    """The quantize ops among them, with their index."""
    return [(i, site) for i, site in enumerate(sites) if site.is_quantizer]


def _role(
    param: relax.Var,
    readers: dict[relax.Var, list[tuple[relax.VarBinding, int]]],
    index: dict[relax.Var, int],
) -> Role:
    var, part, site, below = param, None, None, None
    while var in readers:
        binding, position = readers[var][0]
        name = _op_name(binding.value)
        if name in QUANTIZERS and part is None:
            part, site = position, index[binding.var]
        if _INDEXED.get(name) == position:
            below = _extent(binding.value)
        if name and name not in _TRANSPARENT:
            return Role(_titled(name, part), part, site, below)
        var = binding.var
    return Role(_titled("output", part), part, site, below)


def _extent(call: relax.Call) -> int | None:
    """The length of the axis that an index of `call` selects from."""
    shape = call.args[0].ty.shape
    axis = 1 if call.op.name == "relax.nn.nll_loss" else (call.attrs.axis or 0)
    length = shape[int(axis)] if isinstance(shape, relax.ShapeExpr) else None
    return int(length) if isinstance(length, tirx.IntImm) else None


def _titled(name: str, part: int | None) -> str:
    short = name.removeprefix("relax.")
    return {1: f"scale of {short}", 2: f"zero point of {short}"}.get(part or 0, short)


def _op_name(value: relax.Expr) -> str:
    return getattr(value.op, "name", "") if isinstance(value, relax.Call) else ""

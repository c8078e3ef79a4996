"""Find quantization in a function, and make the one op that replaces each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax

from .._adjoint import bindings_of, used_vars
from .._values import (
    Values,
    equal_shapes,
    is_one,
    is_tensor,
    static_dims,
)
from ..op.fake_quantize import fake_quantize
from .chain import chain_ends, read_chain
from .events import Chain, Parameter, Refused
from .pair import DEQUANTIZE, read_pair
from .parameters import (
    Granularity,
    agree,
    in_shape,
    read_granularity,
    repeated_scale,
)
from .range import Codes, read_codes

OP = "sits.fake_quantize"
_COMMON = ("no-rounding", "no-division", "other-rounding")  # alone, ordinary arithmetic


@dataclass(frozen=True)
class Site:
    """Quantization that ends at `var`.

    Attributes
    ----------
    var : relax.Var
    form : str
        The ops in order, and the granularity.
    make : () -> relax.Expr, optional
        Makes the op in terms of variables of the function; None where the site is refused, or is
        the op already (`refused` is None too).
    refused : Refused, optional
    cuts_gradient : bool
        The chain goes through a cast to an integer.
    inner : relax.Var, optional
        The result of a site that this one contains.
    """

    var: relax.Var
    form: str
    make: Callable[[], relax.Expr] | None = None
    refused: Refused | None = None
    cuts_gradient: bool = False
    inner: relax.Var | None = None
    x: relax.Expr | None = None
    granularity: Granularity | None = None
    scale: Parameter | None = None
    codes: Codes | None = None


def find_sites(func: relax.Function) -> list[Site]:
    """Every place of quantization, in order."""
    values = Values(func)
    found: dict[relax.Var, Site] = {}
    for var, value in values.bound.items():
        site = _site(values, var, value) or _regrouped(values, var, value, found)
        if site is not None:
            found[var] = site
    order = {b.var: i for i, b in enumerate(bindings_of(func))}
    sites = sorted(found.values(), key=lambda site: order.get(site.var, -1))
    inside = {site.inner for site in sites if site.inner is not None}
    uses = _uses(func) if inside else Counter()
    return [site for site in sites if site.var not in inside or uses[site.var] > 1]


def _uses(func: relax.Function) -> Counter[relax.Var]:
    """How often each variable is read."""
    reads = Counter(used_vars(func.body.body))
    for binding in bindings_of(func):
        if isinstance(binding, relax.VarBinding):
            reads.update(used_vars(binding.value))
    return reads


def _site(values: Values, var: relax.Var, value: relax.Expr) -> Site | None:
    name, call = values.call(value)
    if call is None or not call.same_as(value):
        return None
    if name == OP:
        return Site(var, "fake_quantize")
    if name == DEQUANTIZE:
        return _pair(values, var, call)
    refused: Site | None = None
    for codes, chain in chain_ends(values, value):
        site = _read(values, var, codes, chain)
        if site is not None and site.refused is None:
            return site
        refused = refused or site
    return refused


def _read(values: Values, var: relax.Var, codes: relax.Expr, chain: Chain) -> Site | None:
    try:
        read_chain(values, codes, chain)
        return _complete(values, var, chain)
    except Refused as reason:
        if reason.code in _COMMON and not any(e.kind in ("clip", "cast") for e in chain.events):
            return None
        return Site(var, chain.form, refused=reason, cuts_gradient=chain.cuts_gradient)


def _complete(values: Values, var: relax.Var, chain: Chain) -> Site:
    x, scale = chain.x, chain.divisor
    assert x is not None
    assert scale is not None
    if not (is_tensor(x) and equal_shapes(list(x.ty.shape), list(var.ty.shape))):
        raise Refused("shape-unknown", f"x is {x.ty}, and the result {var.ty}")
    rank, scales = len(x.ty.shape), (scale.expr, chain.multiplier.expr)
    if not all(map(is_tensor, scales)):
        raise Refused("shape-unknown", f"the scales are {', '.join(str(s.ty) for s in scales)}")
    dtypes = [str(e.ty.dtype) for e in (x, *scales, var)]
    if dtypes != ["float32"] * 4:
        message = f"x, the scales and the result are {', '.join(dtypes)}, not float32"
        help = "cast x and scale to float32, and the result back: the op computes in float32"
        raise Refused("not-float32", message, help)
    if not agree(values, scale, chain.multiplier, rank):
        message = "x is divided by one scale, and the codes are multiplied by another"
        raise Refused("two-scales", message, "use one scale")
    _check_scale(values, scale)
    codes = read_codes(values, chain, rank)
    granularity, scale = _granularity(values, x, scale, codes.zero_point)
    form = f"{chain.form}; {granularity.name}"
    site = Site(var, form, None, None, chain.cuts_gradient, None, x, granularity, scale, codes)
    return replace(site, make=lambda: _make(values, site))


def _check_scale(values: Values, scale: Parameter) -> None:
    array = values.constant(scale.expr)
    if array is not None and not (np.isfinite(array) & (array > 0)).all():
        raise Refused("scale-not-positive", f"the scale is {array.min()} … {array.max()}")


def _granularity(
    values: Values, x: relax.Expr, scale: Parameter, zero: Parameter | None
) -> tuple[Granularity, Parameter]:
    granularity = read_granularity(values, x, scale, zero)
    repeated = repeated_scale(values, scale.expr) if granularity.group_size == 1 else None
    if repeated is None or zero is not None:
        return granularity, scale
    inner, size, from_end, groups = repeated
    axis, shape = len(granularity.shape) + from_end, list(granularity.shape)
    shape[axis] = groups
    name = f"per group of {size}, axis {axis}"
    return Granularity(name, axis, size, shape, shape), Parameter(inner, shape=shape)


def _make(values: Values, site: Site) -> relax.Call:
    codes, granularity, scale = site.codes, site.granularity, site.scale
    assert codes is not None
    assert granularity is not None
    assert scale is not None
    parameters = [p for p in (scale, codes.zero_point) if p is not None]
    return fake_quantize(
        site.x,
        *(in_shape(values, p, granularity.aligned, granularity.shape) for p in parameters),
        axis=granularity.axis,
        group_size=granularity.group_size,
        **codes.attributes,
    )


def _regrouped(
    values: Values, var: relax.Var, value: relax.Expr, found: dict[relax.Var, Site]
) -> Site | None:
    """x reshaped to rows of one group each, quantized per row, and reshaped back."""
    name, call = values.call(value)
    site = found.get(call.args[0]) if name == "reshape" else None
    if site is None or site.make is None or site.x is None or site.granularity is None:
        return None
    name, split = values.call(site.x)
    if name != "reshape" or split is None or not is_tensor(split.args[0]):
        return None
    x, rows, aligned = split.args[0], list(site.x.ty.shape), site.granularity.aligned
    per_row = equal_shapes(aligned[:-1], rows[:-1]) and is_one(aligned[-1])
    ends = static_dims([x.ty.shape[-1], rows[-1]]) if x.ty.ndim else None
    if not per_row or not equal_shapes(list(x.ty.shape), list(var.ty.shape)) or ends is None:
        return None
    extent, size = ends
    if extent % size:
        return None
    axis, shape = x.ty.ndim - 1, [*list(x.ty.shape)[:-1], extent // size]
    name = f"per group of {size}, axis {axis}"
    granularity = Granularity(name, axis, size, aligned, shape)
    form = f"{site.form.rpartition(';')[0]}; {name}"
    grouped = replace(site, var=var, form=form, inner=site.var, x=x, granularity=granularity)
    return replace(grouped, make=lambda: _make(values, grouped))


def _pair(values: Values, var: relax.Var, call: relax.Call) -> Site | None:
    pair = read_pair(values, var, call)
    if pair is None:
        return None
    form, result, cuts_gradient = pair
    if isinstance(result, Refused):
        return Site(var, form, refused=result, cuts_gradient=cuts_gradient)
    return Site(var, form, make=lambda: result)

"""Arguments on which a gradient is checked: drawn at random, or placed where the clip mask and the
rounding decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import GenericConst

from relax_passes._adjoint import bindings_of

from ..diagnostics import Diagnostic, SitsError
from ._torch_values import to_torch
from ._twin_quantize import Grid
from .parameters import Role, quantize_sites, roles_of
from .twin import Site, sites_of


@dataclass(frozen=True)
class Vector:
    """One array per parameter of the function, and where they come from."""

    name: str
    args: dict[str, np.ndarray]


def draw_vectors(
    func: relax.Function,
    name: str,
    given: Mapping[str, np.ndarray],
    seeds: Sequence[int],
) -> list[Vector]:
    """A vector per seed, and two on the edges of the quantize ops if there are any.

    Parameters
    ----------
    given : mapping of name to array
        Arguments to use as they are; the others are drawn: indices within the axis they select
        from, scales that clip some elements, zero points within the range of the codes.

    Raises
    ------
    SitsError
        For every argument that has to be given, because its shape is symbolic.
    """
    _require_static(func, name, [p for p in func.params if p.name not in given])
    roles, sites = roles_of(func), sites_of(bindings_of(func))
    everything_given = all(param.name in given for param in func.params)
    vectors = [
        Vector("given" if everything_given else f"seed {s}", _draw(func, roles, sites, given, s))
        for s in (seeds[:1] if everything_given else seeds)
    ]
    if _places(func, sites):
        edges = vectors[0].args
        vectors.append(Vector("clip edges", _on_edges(func, sites, edges, power_of_two=True)))
        vectors.append(Vector("ties", _on_edges(func, sites, edges, power_of_two=False)))
    return vectors


def _require_static(func: relax.Function, name: str, params: Sequence[relax.Var]) -> None:
    symbolic = [
        param
        for param in params
        if not isinstance(param.ty, relax.TensorType)
        or not isinstance(param.ty.shape, relax.ShapeExpr)
        or not all(isinstance(extent, tirx.IntImm) for extent in param.ty.shape)
    ]
    if symbolic:
        shown = ", ".join(f"{param.name}: {param.ty}" for param in symbolic)
        message = f"cannot draw arguments without a static shape: {shown}"
        help_ = "give them in inputs= or params="
        raise SitsError([Diagnostic.error("arguments-needed", message, function=name, help=help_)])


def _draw(
    func: relax.Function,
    roles: Mapping[str, Role],
    sites: Sequence[Site],
    given: Mapping[str, np.ndarray],
    seed: int,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    num_input = int((func.attrs or {}).get("num_input", 0))
    args = {}
    for position, param in enumerate(func.params):  # drawn even if given: seeds stay comparable
        shape, dtype = [int(d) for d in _shape_of(param, given)], str(param.ty.dtype)
        args[param.name] = _draw_one(rng, shape, dtype, roles[param.name], position < num_input)
    args.update(given)
    for site in (site for _, site in quantize_sites(sites)):
        _fit_grid(rng, site, args, {param.name: param for param in func.params}, given)
    return args


def _shape_of(param: relax.Var, given: Mapping[str, np.ndarray]) -> Any:
    return given[param.name].shape if param.name in given else param.ty.shape


def _draw_one(
    rng: np.random.Generator, shape: list[int], dtype: str, role: Role, is_input: bool
) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.7
    if "float" not in dtype:
        return rng.integers(0, role.below or 2, shape).astype(dtype)
    if is_input:
        values = rng.standard_normal(shape)
    elif len(shape) < 2:
        values = 0.5 + 0.5 * rng.standard_normal(shape)
    else:
        inputs = int(np.prod(shape)) / max(*shape, 1)
        values = rng.standard_normal(shape) * max(inputs, 1.0) ** -0.5
    return as_dtype(values, dtype)


def _fit_grid(
    rng: np.random.Generator,
    site: Site,
    args: dict[str, np.ndarray],
    params: Mapping[str, relax.Var],
    given: Mapping[str, np.ndarray],
) -> None:
    """Draw scale and zero point of a quantize op so that it clips a few elements."""
    grid, drawn = Grid.of(site.call), [_name(arg) for arg in site.call.args]
    half = (grid.hi - grid.lo + 1) / 2
    if len(drawn) > 2 and drawn[2] in args and drawn[2] not in given:
        zero = rng.uniform(grid.lo + half / 2, grid.hi - half / 2, args[drawn[2]].shape)
        dtype = str(params[drawn[2]].ty.dtype)
        args[drawn[2]] = as_dtype(zero if "float" in dtype else np.rint(zero), dtype)
    if drawn[1] in args and drawn[1] not in given:
        shape = args[drawn[1]].shape
        reach = _reach(grid, args[drawn[0]], shape) if drawn[0] in args else np.full(shape, 2.0)
        scale = reach / half * rng.uniform(0.5, 0.9, shape)
        args[drawn[1]] = as_dtype(scale, str(params[drawn[1]].ty.dtype))


def _reach(grid: Grid, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The largest |x| of the elements that share a scale, in the shape of the scale."""
    import torch

    owner = grid.spread(torch.arange(int(np.prod(shape))).reshape(shape), x.shape).expand(x.shape)
    reach = torch.zeros(int(np.prod(shape)), dtype=torch.float64)
    reach.scatter_reduce_(0, owner.reshape(-1), to_torch(x).abs().reshape(-1), "amax")
    return reach.numpy().reshape(shape) + 1e-6


def _places(func: relax.Function, sites: Sequence[Site]) -> list[Site]:
    """The quantize ops whose tensor is a parameter and whose scale is known before running."""
    names = {param.name for param in func.params}

    def is_known(expr: relax.Expr) -> bool:
        return isinstance(expr, GenericConst) or _name(expr) in names

    return [
        site
        for _, site in quantize_sites(sites)
        if _name(site.call.args[0]) in names and all(map(is_known, site.call.args[1:]))
    ]


def _on_edges(
    func: relax.Function,
    sites: Sequence[Site],
    args: Mapping[str, np.ndarray],
    *,
    power_of_two: bool,
) -> dict[str, np.ndarray]:
    """Every second element of a quantized parameter on a tie or next to an end of the range.

    With scales that are powers of two the ties are exact; with others x / s rounds, and a kernel
    that multiplies by 1 / s takes other codes.
    """
    placed, params = dict(args), {param.name: param for param in func.params}
    for site in _places(func, sites):
        grid, (x, scale, *zero) = Grid.of(site.call), site.call.args
        if power_of_two and _name(scale) in placed:
            value = to_torch(placed[_name(scale)]).numpy()
            exact = np.exp2(np.rint(np.log2(np.maximum(np.abs(value), 1e-30))))
            placed[_name(scale)] = as_dtype(exact, str(params[_name(scale)].ty.dtype))
        known = [to_torch(_value(part, placed)) for part in (scale, *zero)]
        steps = [grid.spread(part, placed[_name(x)].shape).numpy() for part in known]
        placed[_name(x)] = _placed(grid, placed[_name(x)], *steps)
    return placed


def _placed(
    grid: Grid, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None
) -> np.ndarray:
    """Every second element of x at scale · (code - zero point), for codes around the edges."""
    around = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)
    codes = [
        edge + step for edge in (grid.lo, (grid.lo + grid.hi) // 2, grid.hi) for step in around
    ]
    codes += [code + 0.5 for code in range(grid.lo, grid.hi)] + [2 * grid.lo - 9, 2 * grid.hi + 9]
    zero_code = 0.0 if zero is None else np.clip(np.rint(zero), grid.lo, grid.hi)
    cycle = np.resize(np.array(codes), x.size).reshape(x.shape)
    exact = (cycle - zero_code).astype("float32") * scale.astype("float32")
    every_second = np.arange(x.size).reshape(x.shape) % 2 == 0
    return np.where(every_second, as_dtype(exact, str(x.dtype)), x)


def _value(expr: relax.Expr, args: Mapping[str, np.ndarray]) -> Any:
    return expr.value.numpy() if isinstance(expr, GenericConst) else args[_name(expr)]


def _name(expr: relax.Expr) -> str:
    return expr.name if isinstance(expr, relax.Var) else ""


def as_dtype(values: Any, dtype: str) -> np.ndarray:
    """An array of a TVM dtype, bfloat16 too."""
    import ml_dtypes

    return np.asarray(values).astype(getattr(ml_dtypes, dtype, dtype))

"""`check_gradient_conservation`: static walk, gate and report of one function of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import IRModule, relax, tirx

from relax_passes._adjoint import read_adjoint
from relax_passes._gradient_paths import walk_gradients

from ..diagnostics import Diagnostic, raise_errors
from ..host_run import CompileOnce
from ..module_checks import check_is_module
from ..params import as_arrays
from ..pipeline import run_on_host
from .fidelity import fidelity_rows
from .gate import LOSS_SCALES, SEEDS, run_gate
from .result import GradientCheck
from .vectors import draw_vectors


def check_gradient_conservation(
    mod: IRModule,
    func: str = "main",
    *,
    params: Mapping[str, Any] | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    require_grads: Sequence[str] | None = None,
    seeds: Sequence[int] = SEEDS,
    loss_scales: Sequence[float] = LOSS_SCALES,
    fidelity: bool | None = None,
) -> GradientCheck:
    """Whether ``<func>_adjoint`` returns the gradients of `func`.

    First the adjoint is walked (see `relax_passes.gradient_conservation_check`). If every path is
    whole, both functions are compiled for this CPU and compared with a float64 reference in
    PyTorch, built from the forward function alone: the straight-through surrogate where it rounds,
    everything else as it is. Per gradient the relative L2 error must be at most 1e-5 (5e-3 or 4e-2
    if anything in the function is float16 or bfloat16) and zeros must be where the reference has
    them; thresholds are relative, so the size of the loss does not matter.

    What no vector reaches is not compared. A clip, maximum, minimum, relu, abs, sign or comparison
    that decides alike at every element of all vectors is a warning, ``gate-undecided``: an adjoint
    that ignores ``R.clip(x, -50, 50)`` passes where x stays inside.

    Parameters
    ----------
    mod : IRModule
        With `func` and ``<func>_adjoint``, as `sits_tvm.differentiate` makes it. Not changed.
    params : mapping of name to tensor, optional
        Values of arguments. What is not given is drawn anew for each seed; arguments of a symbolic
        shape have to be given, here or in `inputs`.
    inputs : sequence or mapping of name to tensor, optional
        The first arguments, or arguments by name.
    require_grads : sequence of str, optional
        The parameters in the order of the gradients, where the names of the returned variables do
        not tell.
    seeds : sequence of int
    loss_scales : sequence of float
        Factors on the loss.
    fidelity : bool, optional
        Whether to compare gradients at fake-quantized weights with those at float weights too.
        Default: if `params` are given.

    Returns
    -------
    GradientCheck
        `ok`, `rows`, `fidelity`, `diagnostics`; prints as tables.

    Raises
    ------
    SitsError
        If there is no adjoint, an argument does not fit, one of symbolic shape is not given, an op
        has no reference, PyTorch is missing, or the function is not finite at the arguments.
    """
    check_is_module(mod)
    _check_options(func, seeds, loss_scales)
    adjoint = read_adjoint(mod, func, require_grads)
    given = _given(adjoint.forward, func, params, inputs)
    result = GradientCheck(func, diagnostics=walk_gradients(adjoint))
    if not result.ok:
        return result
    compile_ = CompileOnce(run_on_host)
    result.rows, found = run_gate(
        mod, func, compile_,
        given=given, seeds=seeds, loss_scales=loss_scales, require_grads=require_grads,
    )  # fmt: skip
    result.diagnostics += found
    if fidelity if fidelity is not None else params is not None:
        vector = draw_vectors(adjoint.forward, func, given, seeds[:1])[0]
        result.fidelity = fidelity_rows(
            mod, func, compile_, vector.args, require_grads=require_grads
        )
    return result


def _check_options(function: str, seeds: Sequence[int], loss_scales: Sequence[float]) -> None:
    """SitsError for a check that would compare nothing, or only zeros."""
    faults = []
    if not len(seeds):
        faults.append(("seeds is empty: nothing would be compared", "write seeds=(0,)"))
    if not len(loss_scales) or any(not np.isfinite(s) or s == 0 for s in loss_scales):
        found = f"loss_scales={list(loss_scales)} compare nothing, or only zeros"
        faults.append((found, "write finite factors other than 0"))
    raise_errors(
        [Diagnostic.error("check-options", f, function=function, help=h) for f, h in faults]
    )


def _given(
    function: relax.Function,
    name: str,
    params: Mapping[str, Any] | None,
    inputs: Sequence[Any] | Mapping[str, Any] | None,
) -> dict[str, np.ndarray]:
    """Arguments by name, as NumPy arrays; SitsError with every one that does not fit."""
    names = [param.name for param in function.params]
    if inputs is not None and not isinstance(inputs, Mapping):
        if len(inputs) > len(names):
            message = f"{len(inputs)} inputs for {len(names)} arguments: {', '.join(names)}"
            help_ = "give no more than there are, or a mapping by name"
            raise_errors([Diagnostic.error("arguments", message, function=name, help=help_)])
        inputs = dict(zip(names, inputs, strict=False))
    given = {
        key: value if isinstance(value, np.ndarray) else value.numpy()
        for key, value in as_arrays({**(inputs or {}), **(params or {})}).items()
    }
    types = {param.name: param.ty for param in function.params}
    raise_errors(
        [fault for key, value in given.items() for fault in _fault(name, key, value, types)]
    )
    return given


def _fault(
    function: str, name: str, value: np.ndarray, types: Mapping[str, Any]
) -> list[Diagnostic]:
    if name not in types:
        message, help_ = f"no argument is named {name!r}", f"there are {', '.join(types)}"
        return [Diagnostic.error("arguments", message, function=function, help=help_)]
    ty = types[name]
    static = [int(d) if isinstance(d, tirx.IntImm) else None for d in ty.shape or value.shape]
    fits = len(static) == value.ndim and all(
        d is None or d == n for d, n in zip(static, value.shape, strict=True)
    )
    if fits and str(value.dtype) == str(ty.dtype):
        return []
    message = f"`{name}` is {value.dtype} {value.shape}, the function takes {ty}"
    where = {"function": function, "binding": name}
    return [Diagnostic.error("arguments", message, help="convert it to that type", **where)]

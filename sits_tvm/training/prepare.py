"""`prepare_qat`: a module that fake-quantizes its weights, to train it for INT4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm.ir import GlobalVar, IRModule
from tvm.runtime import Tensor

from relax_passes.packed_weights.weight_choice import WeightChoice, read_both_ways
from relax_passes.packed_weights.weight_sites import WeightSite
from tir_schedules.int4_format.rounding import quantize

from .._evaluate_transform import as_numpy, not_quantizable
from ..config import INTEGER_ACTIVATIONS, Config, QuantSpec
from ..diagnostics import Diagnostic, collect, emit, raise_errors
from ..module_checks import check_functions
from ..params import Array, as_arrays, bind_names
from ..report import Report
from ._insert_fake_quantize import QuantizedWeight, fake_quantized

_CHOICES = {"scales": ("learned", "absmax"), "activation": (None, *INTEGER_ACTIVATIONS)}


def prepare_qat(
    mod: IRModule,
    spec: QuantSpec | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    func: str | Sequence[str] = "main",
    scales: str = "learned",
    activation: str | None = None,
    only: Sequence[str] = ("*",),
    skip: Sequence[str] = (),
    quantize_embedding: bool = False,
    quantize_head: bool = False,
    report: Report | None = None,
) -> tuple[IRModule, dict[str, Any]]:
    """Fake-quantize weights, and activations when asked, in the forward function of a module.

    Append a loss to what this returns, differentiate it (`differentiate`, or TVM's `SetupTrainer`),
    train, and give the trained values to `convert_qat`.

    Parameters
    ----------
    mod : IRModule
        With the forward function. It is not changed.
    spec : QuantSpec, optional
        How weights will be stored; by default `QuantSpec()`.
    params : mapping of str to tensor, optional
        Values of the arguments of these names, as `build` takes them. Learned scales start from
        them: at the scales that `build(…, config=Config(quant=spec))` would choose.
    func : str or sequence of str
        The functions to change. Weights are the arguments after ``num_input``, those named in
        `params`, or (for TVM's Trainer) the last ``param_num`` before the states.
    scales : str
        "learned": the scale of each weight is a new argument ``<weight>.scale``, and for an
        asymmetric `spec` ``<weight>.zero_point``, both float32 and trainable, after the weights.
        "absmax": they are computed from the weight in every step (`R.sits.absmax_scale`), and no
        gradient flows through them.
    activation : str or None
        "int8" or "int4": the other operand of each product is fake-quantized, too, with one
        symmetric scale per token, amax / 127 or amax / 7 of its last axis. `convert_qat` keeps it,
        in float: for products of integers build the module that was given, with the weights that
        were trained, and QuantSpec(activation=…). That of `spec` has no effect, a warning says.
    only, skip : sequence of str
        Globs over weight names: those to quantize, and those to leave in float.
    quantize_embedding, quantize_head : bool
        As in `Config`.
    report : Report, optional
        Receives `quantized`, and `skipped` with the reasons; these are notes, too.

    Returns
    -------
    (IRModule, dict)
        The module, and `params` with the values of the new arguments (empty without `params`).
        ``param_num``, where the module has it, counts the new arguments.

    Raises
    ------
    SitsError
        For a function that is not there, parameters that do not fit it, a module without a weight
        to quantize, a weight that is not finite or whose scale overflows ``spec.scale_dtype``.
    """
    spec = spec if spec is not None else QuantSpec()
    names = (func,) if isinstance(func, str) else tuple(func)
    _check_options(spec, scales=scales, activation=activation)
    if spec.activation not in (None, activation):
        found = f"prepare_qat: QuantSpec.activation={spec.activation!r} has no effect on training"
        help_ = f"{spec.activation} activations are not trained: the build rounds them"
        if spec.activation in INTEGER_ACTIVATIONS:
            help_ = f"write prepare_qat(…, activation={spec.activation!r}) to quantize them, too"
        emit(Diagnostic.warning("qat-activation", found, help=help_))
    check_functions(mod, names)
    arrays = {} if params is None else dict(as_arrays(params))
    mod = _with_num_input(mod, names)
    if params is not None:
        mod = bind_names(mod, arrays)
    config = Config(
        quant=spec,
        skip=tuple(skip),
        quantize_embedding=quantize_embedding,
        quantize_head=quantize_head,
    )
    filled = report if report is not None else Report()
    choice = WeightChoice(config, filled, only=tuple(only), constants=False, options="")
    with collect() as notes:
        chosen = choice.choose(mod, names)
    raise_errors(notes)
    for note in notes:
        emit(note)
    return _rewritten(mod, chosen, arrays, spec, scales == "learned", activation)


def _check_options(spec: QuantSpec, **options: object) -> None:
    faults = [
        (f"{name}={value!r} is not supported", f"it takes {', '.join(map(repr, _CHOICES[name]))}")
        for name, value in options.items()
        if value not in _CHOICES[name]
    ]
    if options["scales"] == "absmax" and spec.scale_method != "absmax":
        found = f'scales="absmax" and scale_method={spec.scale_method!r} are two choices'
        faults.append((found, 'write scales="learned", which start from either'))
    raise_errors([Diagnostic.error("qat-option", f"prepare_qat: {f}", help=h) for f, h in faults])


def _with_num_input(mod: IRModule, names: Sequence[str]) -> IRModule:
    """With the inputs that TVM's ``param_num`` and ``state_num`` leave."""
    attrs = mod.attrs or {}
    if "param_num" not in attrs:
        return mod
    out = mod.clone()
    for name in names:
        inputs = len(mod[name].params) - int(attrs["param_num"]) - int(attrs.get("state_num", 0))
        out[name] = mod[name].with_attr("num_input", inputs)
    return out


def _rewritten(
    mod: IRModule,
    chosen: dict[GlobalVar, list[WeightSite]],
    arrays: Mapping[str, Array],
    spec: QuantSpec,
    learned: bool,
    activation: str | None,
) -> tuple[IRModule, dict[str, Any]]:
    out, both_ways = mod.clone(), read_both_ways(chosen)
    attrs = mod.attrs or {}
    added: dict[str, QuantizedWeight] = {}
    for gvar, sites in chosen.items():
        weights: dict[object, QuantizedWeight] = {}
        for site in sites:
            turned = site.transposed and site.name in both_ways
            prefix = f"{site.name}.transposed" if turned else site.name
            if site.packing not in weights:
                weights[site.packing] = QuantizedWeight.of(site, spec, prefix, learned=learned)
                added.setdefault(prefix, weights[site.packing])
        parameters = [p for weight in weights.values() for p in weight.parameters]
        pairs = [(site, weights[site.packing]) for site in sites]
        position = len(out[gvar].params) - int(attrs.get("state_num", 0))
        out[gvar] = fake_quantized(mod, out[gvar], pairs, parameters, position, activation)
    if "param_num" in attrs:
        count = sum(len(weight.parameters) for weight in added.values())
        out = out.with_attr("param_num", int(attrs["param_num"]) + count)
    return out, {**arrays, **_initial_values(added.values(), arrays)} if arrays else {}


def _initial_values(
    weights: Iterable[QuantizedWeight], arrays: Mapping[str, Array]
) -> dict[str, Tensor]:
    faults: list[Diagnostic] = []
    values: dict[str, Tensor] = {}
    for weight in weights:
        if weight.parameters:
            values |= _initial(weight, arrays[weight.site.name], faults)
    raise_errors(faults)
    return values


def _initial(weight: QuantizedWeight, value: Array, faults: list[Diagnostic]) -> dict[str, Tensor]:
    """The scale and zero point that packing would choose for the weight, as float32."""
    array = np.asarray(as_numpy(value), "float32")
    turn = weight.site.transposed
    try:
        _, *parts = quantize(array.T if turn else array, weight.spec)
    except ValueError as error:
        faults.append(not_quantizable(weight.site.name, error))
        return {}
    arrays = [np.asarray(part.T if turn else part, order="C") for part in parts if part is not None]
    tensors = [tvm.runtime.tensor(array.astype("float32")) for array in arrays]
    return {p.name: tensor for p, tensor in zip(weight.parameters, tensors, strict=True)}

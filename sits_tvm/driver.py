"""`build`, `lower` and `check`: the pipeline, with parameters, a report and errors around it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tvm import relax
from tvm.ir import IRModule
from tvm.runtime import Tensor
from tvm.target import Target

from .config import Config
from .device_code import check_device_code, record_launches, require_toolkit
from .diagnostics import Diagnostic, SitsError, collect, emit, raise_errors
from .executable import Executable
from .module_checks import check_is_module, check_well_formed, num_input_faults
from .params import as_arrays, bind_names, pack_params, public_functions, weight_names
from .pipeline import lower_to_vm, run_fusion_passes, run_graph_passes, run_kernel_passes
from .report import Report
from .target import host_mismatch, parse_target

_LOG = logging.getLogger(__name__)


def build(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    *,
    params: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Executable:
    """Compile a Relax module.

    Parameters
    ----------
    mod : IRModule
        All its public Relax functions are built. It is not changed.
    target : str, dict or Target
        As `parse_target` takes it: ``"llvm -mcpu=native"``, ``"cuda -arch=sm_90"``.
    params : mapping of str to tensor, optional
        Values of the arguments of these names, which follow the inputs: TVM, NumPy or DLPack
        tensors. They come back, INT4 weights packed, in `Executable.params`. Without them, INT4
        weights are packed by the function ``<func>_transform_params`` of the executable.
    config : Config, optional
        INT4 is asked for: ``Config(quant=QuantSpec())``. The default leaves weights in float.

    Returns
    -------
    Executable

    Raises
    ------
    SitsError
        With everything that is wrong at the first of these steps that finds something: target,
        module, parameters, graph passes, kernel passes, device code.

    Examples
    --------
    >>> ex = build(mod, "llvm -mcpu=native", params=params, config=Config(quant=QuantSpec()))
    >>> vm = relax.VirtualMachine(ex, tvm.cpu())
    >>> vm["main"](*inputs, *ex.param_list)
    """
    if parse_target(target).kind.name == "cuda":
        require_toolkit()  # before the slow part
    report, config = Report(), config or Config()
    mod, packed, checked = _rewritten(mod, target, params, config, report)
    names = {name: weight_names(func) for name, func in public_functions(mod).items()}
    lowered = run_kernel_passes(mod, checked, config, report)
    _LOG.info("code generation")
    with record_launches() as launches:
        compiled = relax.build(lowered, checked, relax_pipeline=lower_to_vm(checked))
    cubins: list[bytes] = []
    if checked.kind.name == "cuda":
        _LOG.info("compiling device code")
        with collect() as found:
            cubins = check_device_code(compiled, checked, report, launches)
        report.diagnostics += found
    return Executable(compiled.mod, report, packed, names, cubins)


def lower(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    *,
    params: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> tuple[IRModule, Report]:
    """Everything `build` does short of code generation: fused, scheduled PrimFuncs.

    Parameters, errors: as `build`.

    Returns
    -------
    mod : IRModule
        What `build` would generate code for.
    report : Report
        Without what is read back from device code.
    """
    report = Report()
    return _lower(mod, target, params, config or Config(), report), report


def check(
    mod: IRModule,
    target: str | dict[str, Any] | Target = "llvm -mcpu=native",
    *,
    params: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> list[Diagnostic]:
    """What `build` would say of a module before code generation, returned instead of raised.

    What nvcc finds, or that it is missing, is not in it.

    Parameters
    ----------
    mod, target, params, config
        As for `build`. The module is not changed.

    Returns
    -------
    list of Diagnostic
        Errors (for which `build` would raise), warnings and notes, in the order found.
    """
    return preview(mod, target, params, config or Config()).diagnostics


def preview(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    params: Mapping[str, Any] | None,
    config: Config,
) -> Report:
    """The report that `lower` would give, up to the first step that finds an error."""
    report = Report()
    try:
        _lower(mod, target, params, config, report)
    except SitsError as error:
        report.diagnostics += [d for d in error.diagnostics if d not in report.diagnostics]
    return report


def _lower(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    params: Mapping[str, Any] | None,
    config: Config,
    report: Report,
) -> IRModule:
    mod, _, checked = _rewritten(mod, target, params, config, report)
    return run_kernel_passes(mod, checked, config, report)


def unscheduled(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    *,
    params: Mapping[str, Any] | None = None,
    config: Config,
) -> tuple[IRModule, Target]:
    """What `lower` gives, before kernels get their schedules, and the parsed target."""
    report = Report()
    mod, _, checked = _rewritten(mod, target, params, config, report)
    return run_fusion_passes(mod, checked, config, report), checked


def _rewritten(
    mod: IRModule,
    target: str | dict[str, Any] | Target,
    params: Mapping[str, Any] | None,
    config: Config,
    report: Report,
) -> tuple[IRModule, dict[str, Tensor], Target]:
    """Phase 1, with packed parameters."""
    if not isinstance(config, Config):
        message = f"config is a {type(config).__name__}, not a Config"
        help_ = "write config=Config(quant=QuantSpec()), or Config.from_dict(…)"
        raise SitsError([Diagnostic.error("config", message, help=help_)])
    with collect() as found:
        checked = parse_target(target)
        mismatch = host_mismatch(checked)
        if mismatch:
            emit(Diagnostic.warning("target-not-this-machine", mismatch))
    report.diagnostics += found
    report.target = str(checked)
    _check_module(mod)
    arrays = None if params is None else as_arrays(params)
    if arrays is not None:
        mod = bind_names(mod, arrays)
    mod = run_graph_passes(mod, checked, config, report, arrays)
    packed: dict[str, Tensor] = {}
    if arrays is not None:
        mod, packed = pack_params(mod, arrays)
    return mod, packed, checked


def _check_module(mod: IRModule) -> None:
    check_is_module(mod)
    if not public_functions(mod):
        names = ", ".join(gvar.name_hint for gvar in mod.get_global_vars()) or "nothing"
        raise SitsError(
            [
                Diagnostic.error(
                    "no-public-function",
                    f"the module has no public Relax function; it holds {names}",
                    help="mark the entry with @R.function (private=False)",
                )
            ]
        )
    functions = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    raise_errors([d for name, func in functions.items() for d in _faults(name, func)])
    check_well_formed(mod)


def _normalizes_all(expr: relax.Expr) -> bool:
    if not isinstance(expr, relax.Call) or getattr(expr.op, "name", "") != "relax.nn.rms_norm":
        return False
    return len(expr.attrs.axes) == expr.args[0].ty.ndim


def _faults(name: str, func: relax.Function) -> list[Diagnostic]:
    """What of one function could only fail later, without a name."""
    found = num_input_faults(name, func)
    is_public = func.attrs and "global_symbol" in func.attrs
    if is_public and "Primitive" in func.attrs:
        message = f"{name} is public and has the attribute Primitive: TVM would make a kernel of it"
        help_ = "write it with @R.function(private=True), or without the attribute"
        found.append(Diagnostic.error("primitive-function", message, function=name, help=help_))

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Function) and not expr.same_as(func):
            message = f"{name} holds a function of its own, which TVM cannot lower"
            help_ = "write it beside the other, with @R.function(private=True)"
            found.append(Diagnostic.error("local-function", message, function=name, help=help_))
        if _normalizes_all(expr):
            message = f"R.nn.rms_norm over all axes of {expr.args[0].ty}: TVM has no kernel for it"
            help_ = "give it a first axis with R.expand_dims, and take that away with R.squeeze"
            where = {"function": name, "ir": str(expr)}
            found.append(Diagnostic.error("rms-norm-axes", message, help=help_, **where))

    relax.analysis.post_order_visit(func, visit)
    return found

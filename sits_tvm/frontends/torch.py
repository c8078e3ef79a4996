"""`from_torch`: a PyTorch module or ExportedProgram as a Relax module and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tvm
from tvm import IRModule, relax

from ..diagnostics import Diagnostic, SitsError, collect, raise_errors
from ..optional_packages import require

if TYPE_CHECKING:
    import torch

Converter = Callable[[Any, Any], Any]


def from_torch(
    module_or_exported_program: torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> tuple[IRModule, dict[str, tvm.runtime.Tensor]]:
    """Import a PyTorch model.

    Parameters
    ----------
    module_or_exported_program : torch.nn.Module or torch.export.ExportedProgram
        A module is exported first, in the mode it is in: call ``eval()`` before; of one that
        ``torch.ao.quantization.prepare_qat`` made, disable the observers, too.
    example_inputs : sequence or mapping, optional
        Positional arguments, or keyword arguments by name. Needed for a module only.
    dynamic_shapes : optional
        As in ``torch.export.export``, for a module only.

    Returns
    -------
    mod : IRModule
        One function ``main``: the tensor inputs (``num_input`` of them), then the parameters that
        the graph reads, as variables with the names of ``state_dict()`` (dots and all; TVMScript
        prints them as underscores). One output is returned bare, several as a flat tuple.
        Bounds of symbolic dimensions are the attributes ``tir_var_lower_bound`` and
        ``tir_var_upper_bound``. Shapes and memory are planned for them and nothing checks them at
        run time: a larger extent ends in TVM's "storage allocation failure" at best.
    params : dict of str to tvm.runtime.Tensor
        In the order of ``main``; memory is shared with torch where torch's layout allows it. Tied
        weights are one parameter under their first name. Buffers become constants, but a
        persistent buffer over 64 KiB is a parameter.

    A ``detach`` stops gradients (``R.grad.no_grad``), also those of `differentiate`.

    Raises
    ------
    SitsError
        With every op that cannot be imported and its source line, every result whose type differs
        from torch's, every buffer that the model writes to; without PyTorch.
    """
    require("torch", "from_torch", "hf")
    import torch

    if isinstance(module_or_exported_program, torch.export.ExportedProgram):
        if example_inputs is not None or dynamic_shapes is not None:
            raise _usage(
                "an ExportedProgram already holds its inputs and shapes",
                "from_torch(exported_program), without example_inputs and dynamic_shapes",
            )
        return convert_exported_program(module_or_exported_program)
    if not isinstance(module_or_exported_program, torch.nn.Module):
        raise _usage(
            f"expected a torch.nn.Module or ExportedProgram, "
            f"got {type(module_or_exported_program).__name__}",
            "from_torch(module, (example_input,))",
        )
    if example_inputs is None:
        raise _usage("a module needs example inputs", "from_torch(module, (example_input,))")
    args, kwargs = _arguments(example_inputs)
    return convert_exported_program(
        _export(module_or_exported_program, args, kwargs, dynamic_shapes)
    )


def convert_exported_program(
    program: torch.export.ExportedProgram, extra_converters: Mapping[str, Converter] | None = None
) -> tuple[IRModule, dict[str, tvm.runtime.Tensor]]:
    """`from_torch` for an ExportedProgram, with converters for ops of the caller's own.

    Parameters
    ----------
    program : torch.export.ExportedProgram
    extra_converters : mapping of str to (torch.fx.Node, importer) -> relax.Expr, optional
        By ``node.target.__name__``, such as ``"attention.default"``. ``importer.env`` maps nodes to
        Relax expressions, ``importer.block_builder`` emits.
    """
    from relax_passes._import_fixes import IMPORT_FIXES

    from ._torch_importer import Importer, decompose
    from ._torch_nodes import check_names, stopped_gradients

    check_names(program)
    with stopped_gradients(program):
        program = decompose(program)
    mod, params = Importer(extra_converters or {}).convert(program)
    with collect() as found:
        mod = tvm.transform.Sequential(list(IMPORT_FIXES))(mod)
    raise_errors(found)
    return module_of(mod["main"]), params


def module_of(main: relax.Function) -> IRModule:
    """A module of `main`, whose global variable has its type: other functions can call it."""
    bb = relax.BlockBuilder()
    bb.add_func(main, "main")
    return bb.get()


def _export(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    import torch

    from ._torch_fake_quantize import flags_as_they_are

    try:
        # With gradients, or regions under no_grad leave no trace.
        with flags_as_they_are(module), torch.enable_grad():
            return torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
    except SitsError:
        raise
    except Exception as error:
        help = "make torch.export.export(module, args, dynamic_shapes=…, strict=False) work first"
        found = f"torch.export: {type(error).__name__}: {error}"
        raise SitsError([Diagnostic.error("torch-export-failed", found, help=help)]) from error


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    import torch

    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    return tuple(example_inputs), {}


def _usage(found: str, write: str) -> SitsError:
    return SitsError([Diagnostic.error("from-torch-arguments", found, help=f"write {write}")])

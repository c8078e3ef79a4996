"""Check that every trainable parameter keeps its gradient. Changes nothing; runs on modules that
hold `<f>` and `<f>_adjoint`, before INT4 kernels replace the ops that have gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tvm
from tvm import IRModule
from tvm.ir.transform import PassContext

from sits_tvm.diagnostics import Diagnostic, SitsError, emit

from ._adjoint import adjoint_names, read_adjoint
from ._gradient_paths import walk_gradients

Gate = Callable[[IRModule, str], Sequence[Diagnostic]]


@tvm.transform.module_pass(opt_level=0, name="GradientConservationCheck")
class GradientConservationCheck:
    """Emit what `gradient_conservation_check` and the gate find; the module stays as it is.

    An error says that the gradient of a parameter is cut (`gradient-cut`: it is a constant where
    the loss depends on the parameter), passes through an integer (`gradient-truncated`), is held
    in fewer bits than its value (`gradient-narrowed`), or has another shape (`gradient-shape`:
    `relax.transform.Gradient` does not check what a gradient rule returns).

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(w: R.Tensor((8,), "float32")) -> R.Tensor((), "float32"):
                return R.sum(w)

            @R.function
            def main_adjoint(w: R.Tensor((8,), "float32")):
                with R.dataflow():
                    loss = R.sum(w)
                    loss_adjoint = R.ones((), "float32")
                    w_adjoint = R.broadcast_to(loss_adjoint, (8,))
                    R.output(loss, w_adjoint)
                return (loss, (w_adjoint,))

    After::

        @I.ir_module
        class After:
            @R.function
            def main(w: R.Tensor((8,), "float32")) -> R.Tensor((), "float32"):
                return R.sum(w)

            @R.function
            def main_adjoint(w: R.Tensor((8,), "float32")):
                with R.dataflow():
                    loss = R.sum(w)
                    loss_adjoint = R.ones((), "float32")
                    w_adjoint = R.broadcast_to(loss_adjoint, (8,))
                    R.output(loss, w_adjoint)
                return (loss, (w_adjoint,))

    Parameters
    ----------
    gate : (module, function name) -> sequence of Diagnostic, optional
        Runs on each function whose paths are whole, and compares numbers.
    severity : str
        "error", or "warning" to let a build go on.
    """

    def __init__(self, gate: Gate | None = None, *, severity: str = "error") -> None:
        if severity not in ("error", "warning"):
            raise ValueError(f"severity={severity!r}: write 'error' or 'warning'")
        self.gate, self.severity = gate, severity

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        for name in adjoint_names(mod):
            found = gradient_conservation_check(mod, name)
            if self.gate is not None and all(d.severity != "error" for d in found):
                found += self.gate(mod, name)
            for diagnostic in found:
                emit(self._at_most(diagnostic))
        return mod

    def _at_most(self, diagnostic: Diagnostic) -> Diagnostic:
        return (
            replace(diagnostic, severity=self.severity)
            if diagnostic.severity == "error"
            else diagnostic
        )


def gradient_conservation_check(
    mod: IRModule, func: str = "main", require_grads: Sequence[str] | None = None
) -> list[Diagnostic]:
    """What is wrong with the gradients of ``<func>_adjoint``, without running it.

    Parameters
    ----------
    require_grads : sequence of str, optional
        The parameters in the order of the gradients; by default read from the returned variables.

    Returns
    -------
    list of Diagnostic
        Errors, a warning for a parameter that the loss does not depend on, and a note on an op
        whose gradient rule raises where a cut is looked for. Time is linear in the number of
        bindings.
    """
    try:
        return walk_gradients(read_adjoint(mod, func, require_grads))
    except SitsError as error:
        return error.diagnostics

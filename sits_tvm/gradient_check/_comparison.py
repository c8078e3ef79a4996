"""Rows of the gate: what a compiled function returns on a vector, against its twin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from tvm import relax

from relax_passes._adjoint import SUFFIX, Adjoint, bindings_of

from ..diagnostics import Diagnostic, SitsError
from ..host_run import Run
from ._instrument import OUTPUT, Instrumented, scale_dtype
from ._torch_values import to_torch
from .measures import LIMITS, Measure, is_noise, measure
from .parameters import roles_of
from .result import GradientRow
from .twin import Twin, TwinRun
from .vectors import Vector

_NOISE_DRAWS = 4


class Comparison:
    """Compares the functions of `tested`, which `run` executes, with `twin`."""

    def __init__(
        self, twin: Twin, tested: Instrumented, run: Run, loss_scales: Sequence[float]
    ) -> None:
        self.twin, self.tested, self.execute, self.scales = twin, tested, run, loss_scales
        self.adjoint = tested.adjoint
        self.roles = roles_of(self.adjoint.forward)
        self.limit = _limit(self.adjoint.forward)

    def rows(self, vector: Vector) -> list[GradientRow]:
        """Values of the forward function, then gradients at every loss scale."""
        args = [vector.args[param.name] for param in self.adjoint.forward.params]
        outputs, recorded = self.execute(self.adjoint.name, args)
        forward_points = dict(zip(self.tested.forward_keys, recorded, strict=True))
        runs = [(scale, *self._run_adjoint(args, scale)) for scale in self.scales]
        points = dict(zip(self.tested.adjoint_keys, runs[0][3], strict=True)) or forward_points
        reference = _Reference(self.twin, self.adjoint, args, points)
        reference.require_finite(vector.name)
        values = self._value_rows(vector, args, outputs, forward_points)
        if len(self.tested.adjoint_keys) == len(self.tested.forward_keys):  # its codes are known
            values += self._output_rows(vector, "adjoint output", runs[0][1], reference)
        return values + [
            self._gradient_row(vector, scale, i, gradient, reference)
            for scale, _, gradients, _ in runs
            for i, gradient in enumerate(gradients)
        ]

    def _run_adjoint(self, args: Sequence[np.ndarray], scale: float) -> Any:
        seed = np.array(scale, scale_dtype(self.adjoint))
        return self.execute(self.adjoint.name + SUFFIX, [*args, seed])

    def _gradient_row(
        self, vector: Vector, scale: float, index: int, got: np.ndarray, reference: _Reference
    ) -> GradientRow:
        param, want = self.adjoint.gradients[index][0].name, reference.gradients[index]
        role = self.roles[param]
        clipped = None if role.site is None else reference.run.clipped.get(role.site)
        masked = clipped.numpy() if clipped is not None and role.part == 0 else None
        found = measure(got, want * scale, self.limit, masked=masked)
        status = _status(found, want, self.limit, lambda: reference.noise[index])
        share = 0.0 if clipped is None else float(clipped.double().mean())
        return GradientRow(
            param, role.operator, vector.name, scale, status, self.limit, share, got.size,
            found.relative_l2, found.cosine, found.max_difference, found.zero_mismatches,
        )  # fmt: skip

    def _value_rows(
        self, vector: Vector, args: Sequence[np.ndarray], outputs: Any, points: Mapping[Any, Any]
    ) -> list[GradientRow]:
        """Outputs, and the results of the quantize ops, at the forward function's own codes."""
        reference = _Reference(self.twin, self.adjoint, args, points)
        rows, run = self._output_rows(vector, "output", outputs, reference), reference.run
        for (site, position), got in points.items():
            if position == OUTPUT:
                var, op = self.twin.sites[site].binding.var, self.twin.sites[site].call.op
                operator = op.name.removeprefix("relax.")
                rows.append(self._value_row(vector, var.name, operator, got, run.quantized[site]))
        return rows

    def _output_rows(
        self, vector: Vector, operator: str, outputs: Any, reference: _Reference
    ) -> list[GradientRow]:
        pairs = zip(_leaves(outputs), _leaves(reference.run.outputs), strict=True)
        return [
            self._value_row(
                vector, f"output {i}", operator, got, want.detach(),
                partial(reference.output_noise, i),
            )
            for i, (got, want) in enumerate(pairs)
        ]  # fmt: skip

    def _value_row(
        self,
        vector: Vector,
        name: str,
        operator: str,
        got: np.ndarray,
        want: Any,
        noise: Callable[[], float] = lambda: 0.0,
    ) -> GradientRow:
        found = measure(got, np.asarray(want, "float64"), self.limit)
        status = "pass" if found.relative_l2 <= self.limit else "fail"
        if status == "fail" and is_noise(found.relative_l2, self.limit, noise()):
            status = "noise"
        return GradientRow(
            name, f"value of {operator}", vector.name, 1.0, status, self.limit, 0.0, got.size,
            found.relative_l2, found.cosine, found.max_difference, 0,
        )  # fmt: skip


class _Reference:
    """Gradients of the twin by autograd, in the order of the adjoint's."""

    def __init__(
        self, twin: Twin, adjoint: Adjoint, args: Sequence[np.ndarray], points: Mapping[Any, Any]
    ) -> None:
        self.twin, self.adjoint, self.args, self.points = twin, adjoint, args, points
        self.gradients, self.run = self._differentiate(None)

    @property
    def noise(self) -> list[float]:
        """The largest relative change of each gradient under random rounding errors."""
        return _changes([gradients for gradients, _ in self._draws], self.gradients)

    def output_noise(self, index: int) -> float:
        """That of an output."""
        return _changes([_values(run) for _, run in self._draws], _values(self.run))[index]

    @cached_property
    def _draws(self) -> list[tuple[list[np.ndarray], TwinRun]]:
        import torch

        random = torch.Generator().manual_seed(0)
        return [self._differentiate(random) for _ in range(_NOISE_DRAWS)]

    def require_finite(self, vector: str) -> None:
        loss = _values(self.run)[self.adjoint.target_index()]
        if np.isfinite(loss).all():
            return
        message = f"the loss itself is {loss} in the float64 reference, at the arguments {vector!r}"
        help_ = "give inputs= and params= at which the function is defined"
        name = self.adjoint.name
        raise SitsError([Diagnostic.error("loss-not-finite", message, function=name, help=help_)])

    def _differentiate(self, noise: Any) -> tuple[list[np.ndarray], TwinRun]:
        import torch

        params = [param.name for param in self.adjoint.forward.params]
        tensors = {n: to_torch(arg) for n, arg in zip(params, self.args, strict=True)}
        leaves = [tensors[p.name].requires_grad_() for p, _ in self.adjoint.gradients]
        run = self.twin.run(list(tensors.values()), self.points, noise=noise)
        loss = _leaves(run.outputs)[self.adjoint.target_index()]
        if not loss.requires_grad:
            return [np.zeros(leaf.shape) for leaf in leaves], run
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        return [np.zeros(x.shape) if g is None else g.numpy() for x, g in pairs], run


def _values(run: TwinRun) -> list[np.ndarray]:
    return [leaf.detach().numpy() for leaf in _leaves(run.outputs)]


def _changes(draws: Sequence[list[np.ndarray]], exact: Sequence[np.ndarray]) -> list[float]:
    return [
        max(measure(draw[i], value, 0.0).relative_l2 for draw in draws)
        for i, value in enumerate(exact)
    ]


def _status(found: Measure, reference: np.ndarray, limit: float, noise: Callable[[], float]) -> str:
    if found.relative_l2 <= limit and found.zero_mismatches == 0:
        return "pass" if reference.any() else "zero"
    if found.leaks:
        return "fail"
    return "noise" if is_noise(found.relative_l2, limit, noise()) else "fail"


def _limit(func: relax.Function) -> float:
    """Of the narrowest float in the function."""
    dtypes = {str(getattr(b.var.ty, "dtype", "")) for b in bindings_of(func)}
    return max((LIMITS.get(dtype, 0.0) for dtype in dtypes), default=0.0) or LIMITS["float32"]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]

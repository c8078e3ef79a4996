"""`convert_qat`: what training made, as a module that `build` turns into packed INT4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import Pass
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes._inlining import called_from
from relax_passes.fix_quantize_gradient import FixQuantizeGradient
from relax_passes.op import fake_quantize
from relax_passes.op._affine import format_of
from relax_passes.packed_weights.fake_quantized_sites import FAKE_QUANTIZE, fake_quantizes_weight
from relax_passes.packed_weights.weight_sites import bindings_of, weights_of
from tir_schedules.int4_format.rounding import quantize
from tir_schedules.quantization.affine import AffineFormat

from .._evaluate_transform import as_numpy
from ..config import BITS, GROUP_SIZES, QuantSpec
from ..diagnostics import Diagnostic, SitsError, emit, raise_errors
from ..module_checks import check_functions
from ..params import as_arrays

_ABSMAX = "relax.sits.absmax_scale"


def convert_qat(
    mod: IRModule,
    params: Mapping[str, Any],
    spec: QuantSpec | None = None,
    *,
    func: str | Sequence[str] = "main",
) -> tuple[IRModule, dict[str, Any]]:
    """Freeze the scales of a trained module; `build` then packs its weights in INT4.

    The packed weights dequantize to exactly the values that the forward pass of training used
    (float16 weights: before they were rounded to float16).

    Parameters
    ----------
    mod : IRModule
        What `prepare_qat` returned, with or without the functions that training added. It is not
        changed.
    params : mapping of str to tensor
        Trained values of the arguments of these names.
    spec : QuantSpec, optional
        If given, every fake-quantized weight must be as it says. Its `activation` has no effect,
        as a warning says.
    func : str or sequence of str
        The functions to deploy; others are dropped, but for those that these call.

    Returns
    -------
    (IRModule, dict)
        The functions, in which scales and zero points of weights are parameters: learned scales as
        they are, absmax scales computed once (``<weight>.scale``), zero points rounded, clamped
        and stored as integers. Arguments after the inputs that nothing reads are gone, from
        `params`, too. Give both to `build`.

    Raises
    ------
    SitsError
        Without a fake-quantized weight. With every function or parameter that is missing, every
        scale that is not positive and finite in the dtype of deployment, every zero point or weight
        that is not finite, and every weight that is quantized in another way than `spec`.
    """
    names = (func,) if isinstance(func, str) else tuple(func)
    check_functions(mod, names)
    if spec is not None and spec.activation is not None:
        message = (
            f"convert_qat: QuantSpec.activation={spec.activation!r} has no effect: weights only"
        )
        help_ = "to use it, build the module before prepare_qat with the trained weights"
        emit(Diagnostic.warning("qat-activation", message, help=help_))
    arrays = {name: as_numpy(array) for name, array in as_arrays(params).items()}
    out = mod.clone()
    for gvar in set(mod.get_global_vars()):
        if gvar.name_hint not in {*names, *called_from(mod, set(names))}:
            del out[gvar]
    fix: Pass = FixQuantizeGradient()
    out = relax.transform.DeadCodeElimination(list(names))(fix(out))
    _check_weights(out, names)
    values: dict[str, Any] = {}
    found: list[Diagnostic] = []
    for name in names:
        freezer = _Freezer(out, name, arrays, spec)
        out[name] = freezer.run()
        found += freezer.found
        values |= freezer.values
    raise_errors(found)
    tensors = {n: tvm.runtime.tensor(np.asarray(v, order="C")) for n, v in values.items()}
    return out, {name: params[name] if name not in tensors else tensors[name] for name in values}


def _check_weights(mod: IRModule, names: Sequence[str]) -> None:
    """SitsError unless one of the functions, or one that they call, fake-quantizes a weight."""
    for gvar, func in mod.functions_items():
        if fake_quantizes_weight(func, is_called=gvar.name_hint not in names):
            return
    message = f"no weight (an argument after num_input) is fake-quantized in {', '.join(names)}"
    help_ = "give what prepare_qat(mod, spec) returned, trained: it fake-quantizes the weights"
    raise SitsError([Diagnostic.error("nothing-to-convert", message, help=help_)])


@mutator
class _Freezer(PyExprMutator):
    """Rewrites one function; `values` are those of the parameters that it then has."""

    def __init__(
        self,
        mod: IRModule,
        name: str,
        arrays: Mapping[str, np.ndarray],
        spec: QuantSpec | None,
    ) -> None:
        super().__init__(mod)
        self.func, self.name, self.spec = mod[name], name, spec
        self.arrays = arrays
        self.weights = weights_of(self.func)
        self.bound = {b.var: b.value for b in bindings_of(self.func.body)}
        self.frozen: dict[str, tuple[relax.Var, np.ndarray]] = {}  # new arguments by name
        self.found: list[Diagnostic] = []
        self.values: dict[str, np.ndarray] = {}

    def run(self) -> relax.Function:
        body = self.visit_expr(self.func).body
        inputs = [p for p in self.func.params if p not in self.weights]
        old = [p for p in self.func.params if p in self.weights and p.name not in self.frozen]
        new = [variable for variable, _ in self.frozen.values()]
        draft = relax.Function(
            [*inputs, *old, *new], body, self.func.ret_ty, self.func.is_pure, self.func.attrs
        )
        draft = relax.analysis.remove_all_unused(draft)
        used = set(relax.analysis.free_vars(draft.body))
        parameters = [p for p in (*old, *new) if p in used]
        for parameter in parameters:
            self._keep_value(parameter.name)
        arguments = [*inputs, *parameters]
        return relax.Function(arguments, draft.body, draft.ret_ty, draft.is_pure, draft.attrs)

    def _keep_value(self, name: str) -> None:
        if name in self.frozen:
            self.values[name] = self.frozen[name][1]
        elif name in self.arrays:
            self.values[name] = self.arrays[name]
        else:
            self._fault("params-missing", f"no parameter `{name}` is given", "")

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op != FAKE_QUANTIZE or call.args[0] not in self.weights:
            return super().visit_call_(call)
        weight = call.args[0]
        if weight.name not in self.arrays:
            return call  # reported with the others that are missing
        form = format_of(call)
        if self.spec is not None:
            self._compare(weight.name, form, len(call.args) == 3)
        parameters = self._parameters(call, form)
        attrs = dict(call.attrs.items())
        return fake_quantize(weight, *parameters, **attrs)

    def _parameters(self, call: relax.Call, form: AffineFormat) -> list[relax.Expr]:
        """The frozen scale and zero point of a fake-quantized weight."""
        if self._is_absmax(call.args[1]) and form.bits in BITS and form.group_size in GROUP_SIZES:
            return self._absmax(call, form)
        scale = self.visit_expr(call.args[1])
        if scale in self.weights and scale.name in self.arrays:
            self._check_scale(scale.name, form)
        zero_points = [self._zero_point(arg, form) for arg in call.args[2:]]
        return [scale, *zero_points]

    def _is_absmax(self, arg: relax.Expr) -> bool:
        """Whether `arg` is the absmax_scale of a weight, or a field of it."""
        value = self.bound.get(arg)
        if isinstance(value, relax.TupleGetItem):
            value = self.bound.get(value.tuple_value)
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != _ABSMAX:
            return False
        return value.args[0] in self.weights

    def _absmax(self, call: relax.Call, form: AffineFormat) -> list[relax.Expr]:
        """New arguments for the scale and zero point that training computed in every step."""
        weight, symmetric = call.args[0], len(call.args) == 2
        turned = form.axis % 2 == 0
        assert form.group_size is not None
        spec = QuantSpec(
            bits=form.bits,
            group_size=form.group_size,
            symmetric=symmetric,
            scale_dtype=form.scale_dtype or "float32",
        )
        array = np.asarray(self.arrays[weight.name], "float32")
        try:
            _, scale, zero = quantize(array.T if turned else array, spec)
        except ValueError as error:
            self._fault("weight-not-quantizable", f"`{weight.name}`: {error}")
            return list(call.args[1:])
        scale = np.asarray(scale, "float32")
        made = [self._freeze(f"{weight.name}.scale", scale.T if turned else scale)]
        if zero is not None:
            made.append(self._freeze(f"{weight.name}.zero_point", zero.T if turned else zero))
        return made

    def _zero_point(self, arg: relax.Expr, form: AffineFormat) -> relax.Expr:
        """A learned zero point as the integer that the forward pass rounded it to."""
        if arg not in self.weights or "float" not in str(arg.ty.dtype):
            return arg
        value = self.arrays.get(arg.name)
        if value is None:
            return arg  # reported with the others that are missing
        if not np.isfinite(value).all():
            count = int((~np.isfinite(value)).sum())
            message = (
                f"{count} of {value.size} values of the zero point `{arg.name}` are not finite"
            )
            self._fault("zero-point-not-finite", message)
            return arg
        rounded = np.clip(np.rint(np.asarray(value, "float32")), form.lo, form.hi)
        return self._freeze(arg.name, rounded.astype(form.code_dtype))

    def _freeze(self, name: str, value: np.ndarray) -> relax.Var:
        if name in self.frozen and not np.array_equal(self.frozen[name][1], value):
            name = f"{name}.transposed"
        if name not in self.frozen:
            ty = relax.TensorType(value.shape, str(value.dtype))
            self.frozen[name] = relax.Var(name, ty), value
        return self.frozen[name][0]

    def _check_scale(self, name: str, form: AffineFormat) -> None:
        dtype = form.scale_dtype or "float32"
        with np.errstate(over="ignore"):
            value = np.asarray(self.arrays[name], "float32").astype(dtype)
        bad = ~(np.isfinite(value) & (value > 0))
        if bad.any():
            first = tuple(int(i[0]) for i in np.nonzero(bad))
            message = (
                f"{int(bad.sum())} of {bad.size} scales in `{name}` are not positive and finite in "
                f"{dtype}; the first is {self.arrays[name][first]:g} at {first}"
            )
            help_ = "train with a smaller learning rate for scales, or keep them positive"
            self._fault("scale-not-positive", message, help_)

    def _compare(self, name: str, form: AffineFormat, has_zero_point: bool) -> None:
        assert self.spec is not None
        spec = self.spec
        made = {
            "bits": (form.bits, spec.bits),
            "group_size": (form.group_size, spec.group_size),
            "symmetric": (form.signed and not has_zero_point, spec.symmetric),
            "scale_dtype": (form.scale_dtype or "float32", spec.scale_dtype),
        }
        differing = [
            f"{key}={have!r}, not {want!r}" for key, (have, want) in made.items() if have != want
        ]
        if differing:
            message = f"`{name}` is trained with {', '.join(differing)}"
            self._fault("spec-mismatch", message, "give the spec of prepare_qat, or none")

    def _fault(self, code: str, message: str, help_: str = "") -> None:
        self.found.append(Diagnostic.error(code, message, function=self.name, help=help_))

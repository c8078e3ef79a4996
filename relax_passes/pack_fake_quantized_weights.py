"""Store weights that the module fake-quantizes, or holds as codes, in INT4. Runs before
QuantizeMatmulWeights.

Leaves alone, with a note: codes wider than 4 bits, groups that are not along the input channels or
not of a multiple of 32 elements, computed scales, weights of which the module computes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import PassContext

from sits_tvm.report import QuantizedWeight, Report

from ._inlining import called
from .op._affine import attributes_of
from .op.pack_weight import evaluate, layout_of_call, pack_weight
from .packed_weights.fake_quantized_sites import (
    FakeQuantizedSite,
    find_fake_quantized_sites,
    part_prefixes,
    trained_names,
)
from .packed_weights.packed_function import Packing
from .packed_weights.packed_module import FUNCTION_IS_CALLED, pack_function
from .packed_weights.weight_choice import note_skipped


@tvm.transform.module_pass(opt_level=0, name="PackFakeQuantizedWeights")
class PackFakeQuantizedWeights:
    """Replace ``matmul(x, permute_dims(fake_quantize(W, scale)))`` by a product with packed W.

    The parts stand for exactly the values that the fake quantize returns; they take the place of
    W, scale and zero point among the arguments, as `QuantizeMatmulWeights` does it. Of
    ``R.sits.dequantize(codes, scale)`` they hold the codes as they are: nothing is rounded.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                x: R.Tensor(("s", 64), "float32"),
                w: R.Tensor((32, 64), "float32"),
                w_scale: R.Tensor((32, 2), "float32"),
            ):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    q = R.sits.fake_quantize(w, w_scale, group_size=32, scale_dtype="float16")
                    qt = R.permute_dims(q)
                    y = R.matmul(x, qt)
                    R.output(y)
                return y

    After::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor(("s", 64), "float32"),
                codes: R.Tensor((32, 8, 1), "uint32"),
                scale: R.Tensor((32, 2, 1), "float16"),
            ):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    y = R.sits.int4_matmul(
                        x, codes, scale, n=32, k=64, order="rows",
                        bits=4, group_size=32, symmetric=True, scale_dtype="float16",
                    )
                    R.output(y)
                return y

            @R.function
            def main_transform_params(
                params: R.Tuple(
                    R.Tensor((32, 64), "float32"), R.Tensor((32, 2), "float32")
                )
            ):
                R.func_attr({"sits.param_names": ["w", "w_scale"]})
                with R.dataflow():
                    w = params[0]
                    w_scale = params[1]
                    packed = R.sits.pack_weight(
                        w, w_scale, bits=4, axis=-1, group_size=32, signed=True,
                        narrow_range=False, clip_mask="rounded", scale_dtype="float16",
                        transposed=False, order="rows",
                    )
                    codes = packed[0]
                    scale = packed[1]
                    out = (codes, scale)
                    R.output(out)
                return out

    Parameters
    ----------
    order : str
        Of the packed weights that the target's kernels read, see `packing`.
    report : Report, optional
        Receives `quantized` and `skipped`.
    """

    def __init__(self, *, order: str = "rows", report: Report | None = None) -> None:
        self.order, self.report = order, report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        out, callees = mod.clone(), called(mod.functions.values())
        functions = {g: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
        trained = {name for func in functions.values() for name in trained_names(func)}
        found = {g: list(find_fake_quantized_sites(func)) for g, func in functions.items()}
        prefixes = part_prefixes([s for sites in found.values() for s in sites if not s.reason])
        for gvar, sites in found.items():
            packings = []
            made: dict[object, Packing] = {}
            for site in sites:
                prefix = prefixes.get(site.binding, "")
                packing = self._packing(site, prefix, gvar.name_hint in callees, trained)
                if isinstance(packing, Packing):
                    form = str(attributes_of(site.quantizer))
                    key = (*site.sources, site.transposed, form)
                    packings.append((site, made.setdefault(key, packing)))
                else:
                    note_skipped(self.report, gvar.name_hint, site, packing)
            if packings:
                self._note(gvar.name_hint, packings)
                pack_function(out, gvar, packings)
        return out

    def _packing(
        self, site: FakeQuantizedSite, prefix: str, is_called: bool, trained: set[str]
    ) -> Packing | tuple[str, str]:
        """How to pack a weight, or why not."""
        if site.reason is not None:
            return site.reason
        if is_called:
            return FUNCTION_IS_CALLED
        names = {source.name for source in site.sources if isinstance(source, relax.Var)}
        if names & trained:
            return "trained", "the module computes its gradient; build what convert_qat returns"
        attrs = attributes_of(site.quantizer)
        pack: Callable[..., relax.Call] = partial(
            pack_weight, transposed=site.transposed, order=self.order, **attrs
        )
        types = [arg.ty for arg in site.quantizer.args[1:]]

        def call(weight: relax.Expr, *parameters: relax.Expr) -> relax.Call:
            return pack(weight, *map(_reshaped, parameters, types))

        try:
            draft = call(*site.sources)
            layout = layout_of_call(draft)
        except ValueError as error:
            return "format-not-supported", str(error)
        return Packing(site.sources, layout, prefix, call, lambda *arrays: evaluate(draft, arrays))

    def _note(self, function: str, packings: list[tuple[FakeQuantizedSite, Packing]]) -> None:
        first: dict[Packing, FakeQuantizedSite] = {}
        for site, packing in packings:
            first.setdefault(packing, site)
        for packing, site in first.items():
            layout, held = packing.layout, site.sources[0].ty.dtype
            dtype = tvm.DataType(str(held if "float" in str(held) else site.quantizer.ty.dtype))
            row = QuantizedWeight(
                function, site.binding.name, site.name, str(layout.spec),
                (layout.n, layout.k), layout.n * layout.k * dtype.bits // 8, layout.nbytes,
            )  # fmt: skip
            self.report.quantized.append(row)


def _reshaped(parameter: relax.Expr, ty: relax.TensorType) -> relax.Expr:
    """A scale or zero point in the shape in which the fake quantize takes it."""
    if tvm_ffi.structural_equal(parameter.ty.shape, ty.shape):
        return parameter
    return relax.BlockBuilder().normalize(relax.op.reshape(parameter, ty.shape))

"""Store the weights of matrix products in INT4. Runs before LegalizeOps, on graph-level ops.

Leaves alone, with a note: weights on the left, weights that are sliced or otherwise computed before
the product, batched weights, what `Config.skip` names.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.ir.transform import PassContext

from sits_tvm.config import Config
from sits_tvm.report import Report
from tir_schedules.packing import PackedLayout, Parts, pack

from .op.int4 import layout_attrs, quantize_weight
from .packed_weights.packed_function import Packing
from .packed_weights.packed_module import pack_function
from .packed_weights.weight_choice import WeightChoice, read_both_ways
from .packed_weights.weight_sites import WeightSite


@tvm.transform.module_pass(opt_level=0, name="QuantizeMatmulWeights")
class QuantizeMatmulWeights:
    """Replace ``matmul(x, permute_dims(W))`` by a product with packed INT4 parts of W.

    The parts take the place of W among the arguments of the function; how they come from W is the
    function ``<func>_transform_params``, which takes and returns the arguments after the inputs.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(x: R.Tensor(("s", 64), "float32"), w: R.Tensor((32, 64), "float32")):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    wt = R.permute_dims(w)
                    y = R.matmul(x, wt)
                    R.output(y)
                return y

    After, for ``Config(quant=QuantSpec(group_size=32))``::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor(("s", 64), "float32"),
                w_codes: R.Tensor((32, 8, 1), "uint32"),
                w_scale: R.Tensor((32, 2, 1), "float16"),
            ):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    y = R.sits.int4_matmul(
                        x, w_codes, w_scale, n=32, k=64, lanes=1,
                        bits=4, group_size=32, symmetric=True, scale_dtype="float16",
                    )
                    R.output(y)
                return y

            @R.function
            def main_transform_params(params: R.Tuple(R.Tensor((32, 64), "float32"))):
                R.func_attr({"sits.param_names": ["w"]})
                with R.dataflow():
                    w = params[0]
                    packed = R.sits.quantize_weight(
                        w, n=32, k=64, lanes=1, bits=4, group_size=32, symmetric=True,
                        scale_dtype="float16", scale_method="absmax", transposed=False,
                    )
                    w_codes = packed[0]
                    w_scale = packed[1]
                    out = (w_codes, w_scale)
                    R.output(out)
                return out

    Parameters
    ----------
    config : Config
        `quant` must be set; `quantize_embedding`, `quantize_head` and `skip` are read.
    lanes : int
        Order of the packed weights that the target's kernels read, see `tir_schedules.packing`.
    report : Report, optional
        Receives `quantized` and `skipped`.
    """

    def __init__(
        self,
        config: Config,
        *,
        lanes: int = 1,
        report: Report | None = None,
    ) -> None:
        if config.quant is None:
            raise ValueError("QuantizeMatmulWeights needs Config.quant, for example QuantSpec()")
        self.config, self.spec, self.lanes = config, config.quant, lanes
        self.report = report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        choice = WeightChoice(self.config, self.report, lanes=self.lanes)
        out, chosen = mod.clone(), choice.choose(mod)
        both_ways = read_both_ways(chosen)
        for gvar, sites in chosen.items():
            made = {site.packing: self._packing(site, both_ways) for site in sites}
            pack_function(out, gvar, [(site, made[site.packing]) for site in sites])
        return out

    def _packing(self, site: WeightSite, both_ways: set[str]) -> Packing:
        layout = PackedLayout(*site.shape, self.spec, self.lanes)
        turned = site.transposed and site.name in both_ways
        call = partial(
            quantize_weight,
            transposed=site.transposed,
            scale_method=self.spec.scale_method,
            **layout_attrs(layout),
        )

        def evaluate(weight: np.ndarray) -> Parts:
            return pack(weight.T if site.transposed else weight, self.spec, self.lanes)

        prefix = f"{site.name}.transposed" if turned else site.name
        return Packing((site.source,), layout, prefix, call, evaluate)

"""Store the weights of matrix products in INT4. Runs before LegalizeOps, on graph-level ops.

Leaves alone, with a note: weights on the left, weights that are sliced or otherwise computed before
the product, batched weights, what `Config.skip` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.ir.transform import PassContext

from sits_tvm.config import Config
from sits_tvm.report import Report
from tir_schedules.int4_format.packing import PackedLayout, Parts, pack, stack

from .op.int4 import layout_attrs, quantize_weight
from .packed_weights.packed_function import Packing
from .packed_weights.packed_module import pack_function
from .packed_weights.stacked_weights import stack_weights
from .packed_weights.weight_choice import WeightChoice, read_both_ways
from .packed_weights.weight_sites import WeightSite


@tvm.transform.module_pass(opt_level=0, name="QuantizeMatmulWeights")
class QuantizeMatmulWeights:
    """Replace ``matmul(x, permute_dims(W))`` by a product with packed INT4 parts of W.

    The parts take the place of W among the arguments of the function; how they come from W is the
    function ``<func>_transform_params``, which takes and returns the arguments after the inputs.

    Products of one input become one, with their weights stacked along the output channels: codes
    and scales are those of each weight alone. The parts are named after all of them, ``k+v.codes``,
    and take the place of the first. Weights that other products read too stay apart, and products
    whose results meet elementwise, as those of a gated MLP do: the kernel of one computes what
    follows. `report.stacked` tells.

    Before::

        @I.ir_module
        class Before:
            @R.function
            def main(
                x: R.Tensor(("s", 64), "float32"),
                w: R.Tensor((32, 64), "float32"),
                k: R.Tensor((16, 32), "float32"),
                v: R.Tensor((16, 32), "float32"),
            ):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    wt = R.permute_dims(w)
                    y = R.matmul(x, wt)
                    kt = R.permute_dims(k)
                    keys = R.matmul(y, kt)
                    vt = R.permute_dims(v)
                    values = R.matmul(y, vt)
                    R.output(keys, values)
                return (keys, values)

    After, for ``Config(quant=QuantSpec(group_size=32))``::

        @I.ir_module
        class After:
            @R.function
            def main(
                x: R.Tensor(("s", 64), "float32"),
                w_codes: R.Tensor((32, 8, 1), "uint32"),
                w_scale: R.Tensor((32, 2, 1), "float16"),
                kv_codes: R.Tensor((32, 4, 1), "uint32"),
                kv_scale: R.Tensor((32, 1, 1), "float16"),
            ):
                R.func_attr({"num_input": 1})
                with R.dataflow():
                    y = R.sits.int4_matmul(
                        x, w_codes, w_scale, n=32, k=64, order="rows",
                        bits=4, group_size=32, symmetric=True, scale_dtype="float16",
                    )
                    both = R.sits.int4_matmul(
                        y, kv_codes, kv_scale, n=32, k=32, order="rows",
                        bits=4, group_size=32, symmetric=True, scale_dtype="float16",
                    )
                    keys = R.sits.columns(both, first=0, count=16)
                    values = R.sits.columns(both, first=16, count=16)
                    R.output(keys, values)
                return (keys, values)

            @R.function
            def main_transform_params(
                params: R.Tuple(
                    R.Tensor((32, 64), "float32"),
                    R.Tensor((16, 32), "float32"),
                    R.Tensor((16, 32), "float32"),
                )
            ):
                R.func_attr({"sits.param_names": ["w", "k", "v"]})
                with R.dataflow():
                    w = params[0]
                    k = params[1]
                    v = params[2]
                    packed = R.sits.quantize_weight(
                        w, n=32, k=64, order="rows", bits=4, group_size=32, symmetric=True,
                        scale_dtype="float16", scale_method="absmax", transposed=False,
                    )
                    w_codes = packed[0]
                    w_scale = packed[1]
                    packed_kv = R.sits.quantize_weight(
                        k, v, n=32, k=32, order="rows", bits=4, group_size=32, symmetric=True,
                        scale_dtype="float16", scale_method="absmax", transposed=False,
                    )
                    kv_codes = packed_kv[0]
                    kv_scale = packed_kv[1]
                    out = (w_codes, w_scale, kv_codes, kv_scale)
                    R.output(out)
                return out

    Parameters
    ----------
    config : Config
        `quant` must be set; `quantize_embedding`, `quantize_head` and `skip` are read.
    order : str
        Of the packed weights that the target's kernels read, see `packing`.
    stack : bool
        Whether products of one input become one; without kernels that write `R.sits.columns` of a
        product where they belong, these are copies.
    report : Report, optional
        Receives `quantized`, `skipped` and `stacked`.
    """

    def __init__(
        self,
        config: Config,
        *,
        order: str = "rows",
        stack: bool = True,
        report: Report | None = None,
    ) -> None:
        if config.quant is None:
            raise ValueError("QuantizeMatmulWeights needs Config.quant, for example QuantSpec()")
        self.config, self.spec, self.order, self.stack = config, config.quant, order, stack
        self.report = report if report is not None else Report()

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        choice = WeightChoice(self.config, self.report, order=self.order)
        out, chosen = mod.clone(), choice.choose(mod)
        both_ways = read_both_ways(chosen)
        stacked = stack_weights(mod, chosen, self.order, self.report) if self.stack else {}
        for gvar, sites in chosen.items():
            made = {
                site.packing: packing
                for group in stacked.get(gvar, [])
                for packing in [self._packing(group, "+".join(site.name for site in group))]
                for site in group
            }
            for site in sites:
                if site.packing not in made:
                    turned = site.transposed and site.name in both_ways
                    prefix = f"{site.name}.transposed" if turned else site.name
                    made[site.packing] = self._packing([site], prefix)
            pack_function(out, gvar, [(site, made[site.packing]) for site in sites])
        return out

    def _packing(self, sites: Sequence[WeightSite], prefix: str) -> Packing:
        """Of the weight of a site, or of the weights of several, stacked."""
        transposed, k = sites[0].transposed, sites[0].shape[1]
        counts = [site.shape[0] for site in sites]
        layout = PackedLayout(sum(counts), k, self.spec, self.order)
        call = partial(
            quantize_weight,
            transposed=transposed,
            scale_method=self.spec.scale_method,
            **layout_attrs(layout),
        )

        def evaluate(*weights: np.ndarray) -> Parts:
            rows = (weight.T if transposed else weight for weight in weights)
            return stack([pack(weight, self.spec, self.order) for weight in rows])

        firsts = accumulate(counts, initial=0)
        columns = {s.binding: (f, n) for s, f, n in zip(sites, firsts, counts, strict=False)}
        sources = tuple(site.source for site in sites)
        return Packing(sources, layout, prefix, call, evaluate, columns if len(sites) > 1 else {})

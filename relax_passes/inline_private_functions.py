"""Inline private functions. Runs before every pass that works within one function.

Leaves alone: public functions, and private ones that call themselves.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.ir.transform import PassContext

from ._inlining import called, called_from, inline_calls


@tvm.transform.module_pass(opt_level=0, name="InlinePrivateFunctions")
class InlinePrivateFunctions:
    """Replace the calls of private Relax functions by what they compute.

    As TVM's pass of this name, but shapes of the callee are those of the arguments also where it
    computes with them.

    Before::

        @I.ir_module
        class Before:
            @R.function(private=True)
            def flatten(x: R.Tensor(("n", "m"), "float32")):
                n = T.int64()
                m = T.int64()
                with R.dataflow():
                    y = R.reshape(x, R.shape([n * m]))
                    R.output(y)
                return y

            @R.function
            def main(x: R.Tensor(("s", 4), "float32")):
                cls = Before
                with R.dataflow():
                    y = cls.flatten(x)
                    z = R.exp(y)
                    R.output(z)
                return z

    After::

        @I.ir_module
        class After:
            @R.function
            def main(x: R.Tensor(("s", 4), "float32")):
                s = T.int64()
                with R.dataflow():
                    y = R.reshape(x, R.shape([s * 4]))
                    z = R.exp(y)
                    R.output(z)
                return z
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        functions = {g: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
        private = {
            g.name_hint for g, f in functions.items() if "global_symbol" not in (f.attrs or {})
        }
        out = mod.clone()
        for gvar, func in functions.items():
            if gvar.name_hint not in private and not private.isdisjoint(called([func])):
                out[gvar] = inline_calls(mod, gvar.name_hint, private)[gvar.name_hint]
        public = {g.name_hint for g in out.get_global_vars()} - private
        for name in private - called_from(out, public):
            del out[name]
        return out

"""Runs PruneRedundantAttention in tests, and what it made."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
import tvm_ffi
from relax_interpreter import evaluate, size_of
from small_modules import one_function
from tvm import IRModule, relax, tirx

from relax_passes._adjoint import bindings_of
from relax_passes.op import attention
from relax_passes.prune_redundant_attention import PruneRedundantAttention
from sits_tvm import Report
from sits_tvm.config import GRAPH_RULES
from sits_tvm.pipeline import run_on_host
from sits_tvm.report import AttentionRewrite
from sits_tvm.rewrite_check import check_rewrite

Rows = list[AttentionRewrite]


def tensor(*shape, dtype="float32"):
    return relax.TensorType(shape, dtype)


def function(make, *types):
    """main(a0, a1, …) with the result of ``make(emit, *arguments)``."""
    return one_function(lambda bb, *args: make(bb.emit, *args), *types)


def attend(*types, bias=None, **attributes):
    """main(q, k, v[, mask]) = attention(…); a `bias` is a constant."""

    def make(emit, q, k, v, *mask):
        given = mask[0] if mask else bias if bias is None else relax.const(bias)
        return attention(q, k, v, given, **attributes)

    return function(make, *types)


def qkv(queries, keys, heads=4, kv_heads=2, batch=1, width=8, dtype="float32"):
    return (
        tensor(batch, heads, queries, width, dtype=dtype),
        tensor(batch, kv_heads, keys, width, dtype=dtype),
        tensor(batch, kv_heads, keys, width, dtype=dtype),
    )


def symbols(names):
    return (tirx.Var(name, "int64") for name in names)


def prune(mod: IRModule, *rules: str) -> tuple[IRModule, Rows]:
    """The module and the rows, of one line each.

    The input is as it was, the output is well formed and final.
    """
    digest, report = tvm_ffi.structural_hash(mod), Report()
    chosen = rules or GRAPH_RULES
    out = PruneRedundantAttention(chosen, report=report)(mod)
    assert tvm_ffi.structural_hash(mod) == digest
    assert relax.analysis.check_well_formed(out)
    for gvar, func in out.functions_items():
        if isinstance(func, relax.Function):
            assert tvm_ffi.structural_equal(func.ret_ty, mod[gvar.name_hint].ret_ty)
    assert PruneRedundantAttention(chosen)(out).same_as(out)
    assert not any("\n" in row.reason for row in report.attention_rewrites)
    return out, report.attention_rewrites


def rules_of(rows):
    return [(row.rule, row.changed) for row in rows]


def ops(mod: IRModule, func: str = "main") -> Counter[str]:
    """How often each op is called."""
    values = [b.value for b in bindings_of(mod[func]) if isinstance(b, relax.VarBinding)]
    calls = [v for v in values if isinstance(v, relax.Call) and hasattr(v.op, "name")]
    return Counter(call.op.name.removeprefix("relax.") for call in calls)


def call(mod: IRModule, op: str = "sits.attention") -> relax.Call:
    """The only call of an op."""
    values = [b.value for b in bindings_of(mod["main"]) if isinstance(b, relax.VarBinding)]
    (found,) = [v for v in values if isinstance(v, relax.Call) and v.op.name == f"relax.{op}"]
    return found


def arrays(mod: IRModule, dims: tuple[int, ...], scale: float = 1.0) -> list[torch.Tensor]:
    """Normal numbers for the arguments, `dims` for symbolic dimensions; scores near scale²."""
    rng, found = np.random.default_rng(len(dims)), iter(dims)
    sizes: dict[tirx.Var, int] = {}
    made = []
    for param in mod["main"].params:
        for dim in param.ty.shape:
            if isinstance(dim, tirx.Var) and dim not in sizes:
                sizes[dim] = next(found)
        shape = [size_of(dim, sizes) for dim in param.ty.shape]
        x, dtype = rng.standard_normal(shape), str(param.ty.dtype)
        x = x > -0.5 if dtype == "bool" else x * scale + scale * (scale > 1)
        made.append(torch.from_numpy(np.asarray(x)).to(getattr(torch, dtype)))
    return made


def assert_same_values(
    before: IRModule, after: IRModule, *dims: tuple[int, ...], exact: bool = False
) -> None:
    """Op by op in torch, and scores of some hundreds too; `dims` of some calls."""
    for values in dims or [()]:
        for scale in (1.0, 9.0):
            inputs = arrays(before, values, scale)
            for old, new in zip(evaluate(before, inputs), evaluate(after, inputs), strict=True):
                assert old.dtype == new.dtype
                limit = 0.0 if exact else 4 * scale * torch.finfo(old.dtype).eps
                torch.testing.assert_close(new, old, rtol=limit, atol=limit, equal_nan=True)


def assert_checked(before: IRModule, after: IRModule) -> None:
    """Compiled, on the draws of `Config(verify=True)`, against float64: takes seconds."""
    rows = check_rewrite(before, after, run_on_host)
    assert rows
    wrong = [row for row in rows if row.reason or not row.difference <= row.limit]
    assert not wrong, wrong

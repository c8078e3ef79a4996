"""Small graphs of attention, and what CanonicalizeAttention makes of them."""

import numpy as np
import tvm_ffi
from small_modules import one_function
from tvm import relax
from tvm.ir import Op, assert_structural_equal
from tvm.relax import op as O

from relax_passes.canonicalize_attention import CanonicalizeAttention
from relax_passes.op.attention import ATTRIBUTES
from sits_tvm.diagnostics import collect
from sits_tvm.report import Report

INF = float("-inf")
LOWEST = float(np.finfo("float32").min)


def block(steps, *, q=(2, 4, 6, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8), after=None):
    """softmax(steps(bb, q kᵀ)) v, and `after(bb, weights)` before the second product."""

    def body(bb, q_, k_, v_):
        scores = bb.emit(O.matmul(q_, bb.emit(O.permute_dims(k_, [0, 1, 3, 2]))))
        weights = bb.emit(O.nn.softmax(steps(bb, scores), axis=-1))
        weights = weights if after is None else after(bb, weights)
        return O.matmul(weights, v_)

    return one_function(body, *(relax.TensorType(shape, "float32") for shape in (q, k, v)))


def canonical(mod):
    """The module after the pass and its report; the input stays as it is, twice is once."""
    digest, report = tvm_ffi.structural_hash(mod), Report()
    after = CanonicalizeAttention(report=report)(mod)
    assert tvm_ffi.structural_hash(mod) == digest
    assert_structural_equal(CanonicalizeAttention()(after), after)
    return after, report.attention


def attention_of(mod):
    """The one call, as a dictionary of its attributes and its bias."""
    after, rows = canonical(mod)
    assert [row.recognised for row in rows] == [True], rows
    calls = []

    def note(expr):
        if isinstance(expr, relax.Call) and expr.op == Op.get("relax.sits.attention"):
            calls.append(expr)

    relax.analysis.post_order_visit(after["main"], note)
    (call,) = calls
    bias = call.args[3] if len(call.args) > 3 else None
    return {**{key: call.attrs[key] for key in ATTRIBUTES}, "bias": bias, "args": call.args}


def reason_of(mod):
    """The code of the one near miss; nothing is changed."""
    with collect() as notes:
        after, rows = canonical(mod)
    assert_structural_equal(after, mod)
    (row,) = rows
    assert not row.recognised
    code = row.reason.split(":")[0]
    assert {note.code for note in notes} == {f"attention-{code}"}
    return code


def const(value, dtype="float32"):
    return relax.const(value, dtype)


def causal(bb, rows=6, columns=7, k=0):
    ones = bb.emit(O.ones(relax.ShapeExpr([rows, columns]), "bool"))
    return bb.emit(O.tril(ones, k))


def masked(fill, k=0):
    def steps(bb, scores):
        return bb.emit(O.where(causal(bb, k=k), scores, const(fill)))

    return steps


def row_of(bb, scores, reduction):
    """A reduction over the keys, as a column."""
    return bb.emit(reduction(scores, axis=-1, keepdims=True))

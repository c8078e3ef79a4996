"""`relax.sits.attention` as a PrimFunc without a schedule: what a kernel of it computes."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as T

from ..emit import int64, registers, scratch, serial, with_emitted_body
from .cpu_scores import (
    HIDDEN,
    LOWEST,
    Rows,
    capped,
    finite,
    float32,
    inverse,
    opaque,
    with_bias,
)
from .spec import ATTRIBUTE, AttentionSpec

# TOpPattern kOpaque: FuseOps leaves calls of such a function alone.
_OPAQUE = 8


def plain_attention(spec: AttentionSpec) -> tirx.PrimFunc:
    """The function of ``spec.arguments``, which `spec_of` gives `spec` back for."""
    attrs = {
        "s_tir": True,
        "tirx.noalias": True,
        "op_pattern": _OPAQUE,
        ATTRIBUTE: spec.attributes,
    }
    func = tirx.PrimFunc(spec.arguments, tirx.Evaluate(0)).with_attr(attrs)
    return with_emitted_body(func, lambda: _emit(spec))


def _emit(spec: AttentionSpec) -> None:
    scores = scratch(tirx.max(spec.num_keys, int64(1)))
    largest, total, value = registers(3, 1)
    rows_of_head = spec.num_queries * spec.group
    with serial(spec.batch) as batch, serial(spec.num_kv_heads) as head:
        rows = Rows.make(spec, batch, head, int64(0), rows_of_head - 1)
        with serial(rows_of_head) as row:
            _scores(rows, row, scores, largest, value)
            _softmax(spec, scores, largest, total)
            _outputs(rows, row, scores, total, value)


def _scores(
    rows: Rows, row: tirx.Expr, scores: tirx.Buffer, largest: tirx.Buffer, value: tirx.Buffer
) -> None:
    spec, (query, head) = rows.spec, rows.query_and_head(row)
    _set(largest, float32(HIDDEN))
    with serial(spec.num_keys) as key:
        _set(value, float32(0.0))
        with serial(spec.head_dim) as d:
            q = spec.q[rows.batch, head, query, d].astype("float32")
            k = spec.k[rows.batch, rows.head, key, d].astype("float32")
            _set(value, value[0] + q * k)
        score = capped(value[0] * float32(spec.scale), spec.softcap)
        if spec.bias is not None:
            score = with_bias(spec, score, rows.bias(query, head, key))
        score = tirx.Select(rows.hides(query, key), float32(HIDDEN), score)
        if spec.empty_row == "uniform":
            score = tirx.Select(score == float32(HIDDEN), float32(LOWEST), score)
        T.buffer_store(scores, score, [key])
        _set(largest, tirx.max(largest[0], scores[key]))


def _softmax(
    spec: AttentionSpec, scores: tirx.Buffer, largest: tirx.Buffer, total: tirx.Buffer
) -> None:
    """Not divided by the sum."""
    _set(total, float32(0.0))
    with serial(spec.num_keys) as key:
        T.buffer_store(scores, tirx.exp(scores[key] - finite(largest[0])), [key])
        _set(total, total[0] + scores[key])


def _outputs(
    rows: Rows, row: tirx.Expr, weights: tirx.Buffer, total: tirx.Buffer, value: tirx.Buffer
) -> None:
    """Whatever a hidden key's value holds stays there."""
    spec, (query, head) = rows.spec, rows.query_and_head(row)
    factor = opaque(inverse(spec, total[0]))
    with serial(spec.value_dim) as d:
        _set(value, float32(0.0))
        with serial(spec.num_keys) as key:
            v = spec.v[rows.batch, rows.head, key, d].astype("float32")
            added = value[0] + weights[key] * v
            _set(value, tirx.Select(weights[key] != float32(0.0), added, value[0]))
        out = (value[0] * factor).astype(spec.dtype)
        T.buffer_store(spec.out, out, [rows.batch, head, query, d])


def _set(cell: tirx.Buffer, value: tirx.Expr) -> None:
    T.buffer_store(cell, value, [int64(0)])

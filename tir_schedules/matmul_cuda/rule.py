"""The CUDA schedule of products with INT4 weights: tensor cores from sm_80 on, for every row count.

A block keeps sums of its output channels and tokens in registers and walks along k. Codes, scales
and activations of the next stages arrive in shared memory by `cp.async` meanwhile. The weight is
the left factor of a product on tensor cores, its 16 rows being output channels, so that eight
tokens, or one, cost one product. Codes are packed in the order of its fragments, see `packing`:
a lane decodes the word that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import DataType, s_tir, tirx
from tvm.target import Target
from tvm.tirx.script import builder as T

from sits_tvm.diagnostics import Diagnostic, SitsError

from ..contraction import Contraction, Int8Rows
from ..cuda_target import has_int4_products
from ..emit import when, with_emitted_body
from ..matmul.recognise import recognise
from ..matmul.workload import excerpt, inputs, prim_func, workload_of
from ..records.space import Spaces, TunableRule, chosen, emit_buckets, reachable, search_space
from ..records.work import Work
from ..records.workloads import MATMULS, MatmulWorkload
from ..tir_nodes import is_const
from .block import launch
from .half import HalfProducts
from .int4 import int4_products
from .int8 import Int8Products
from .operands import Operands
from .output import add_up_block, add_up_parts, partial_sums
from .pipeline import for_each_stage
from .products import Products
from .refusals import DTYPE_TERMS, plain_activations, refused_product, refused_target
from .spaces import distinct, tensor_core_spaces, tile_fault
from .terms import in_terms
from .tile import UNIT, Tile
from .work import unknown_work, work

_ORDER = "fragments"


class TensorCoreMatmul(TunableRule[MatmulWorkload]):
    """Schedule INT4 matmul with float, INT8 or INT4 activations, see `int8_matmul`, and epilogues.

    Left to other rules: weights in another order, and what `refusals` tells.
    """

    families, kind = MATMULS, "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool) -> s_tir.Schedule | None:
        """The scheduled function, or its search space; None if it is not for this rule."""
        found = _recognise(func, target)
        if found is None:
            return None
        product, operands = found
        spaces = _spaces(func, operands, target)
        if tunable:
            return search_space(func, spaces)
        tiles = chosen(func, spaces)
        _check(operands, spaces, tiles, target)
        emitted = with_emitted_body(func, lambda: _emit(product, operands, spaces, tiles))
        return s_tir.Schedule(emitted)

    def workload(self, func: tirx.PrimFunc, target: Target) -> MatmulWorkload | None:
        found = _recognise(func, target)
        return None if found is None else workload_of(found[0])

    def spaces(self, func: tirx.PrimFunc, target: Target) -> Spaces:
        found = _recognise(func, target)
        return {} if found is None else _spaces(func, found[1], target)

    def fault(self, func: tirx.PrimFunc, target: Target, bucket: str, values: Tile) -> str | None:
        found = _recognise(func, target)
        assert found is not None
        most = _spaces(func, found[1], target)[bucket].most
        return tile_fault(replace(found[1], most=most), values, target)

    def work(self, func: tirx.PrimFunc, target: Target) -> Callable[[Any], Work | str]:
        found = _recognise(func, target)
        assert found is not None
        operands = replace(found[1], most=int(found[1].rows))
        output_width = DataType(str(func.params[-1].ty.dtype)).itemsize

        def of(tile: Tile) -> Work | str:
            fault = tile_fault(operands, tile, target) or unknown_work(operands, tile)
            return work(operands, tile, output_width) if fault is None else fault

        return of

    prim_func = staticmethod(partial(prim_func, order=_ORDER))
    inputs = staticmethod(partial(inputs, order=_ORDER))
    excerpt = staticmethod(partial(excerpt, order=_ORDER))


def _recognise(func: tirx.PrimFunc, target: Target) -> tuple[Contraction, Operands] | None:
    if refused_target(target) is not None:
        return None
    product = recognise(func, _ORDER)
    if product is None or refused_product(product) is not None:
        return None
    return product, _operands(product, target)


def _operands(product: Contraction, target: Target) -> Operands:
    rows, n, weight = product.rows.extent, int(product.column.dom.extent), product.rhs
    if isinstance(product.lhs, Int8Rows):
        lhs, k = product.lhs, int(product.padded_k)
        return Operands(
            lhs.codes,
            rows,
            None,
            weight,
            n,
            k=int(weight.codes.shape[1]) * UNIT if lhs.is_packed else k,
            x_scale=lhs.scale,
            x_sums=lhs.sums,
            groups_per_scale=lhs.groups_per_scale,
            is_packed=lhs.is_packed,
            has_int4_products=lhs.is_packed and has_int4_products(target),
        )
    x, k = plain_activations(product), int(product.reduction.dom.extent)
    assert x is not None
    return Operands(x, rows, None, weight, n, k, terms=DTYPE_TERMS[str(x.dtype)])


def _spaces(func: tirx.PrimFunc, operands: Operands, target: Target) -> Spaces:
    return reachable(operands.rows, tensor_core_spaces(operands, target), func)


def _check(operands: Operands, spaces: Spaces, tiles: dict[str, Any], target: Target) -> None:
    """SitsError if there is no kernel with the tile of a bucket."""
    for bucket, tile in tiles.items():
        fault = tile_fault(replace(operands, most=spaces[bucket].most), tile, target)
        if fault is not None:
            message = f"the parameters of rows {bucket} have no kernel: {fault}"
            help_ = "tune again, or leave them out: there is a default for 48 KiB of shared memory"
            raise SitsError([Diagnostic.error("kernel-parameters", message, help=help_)])


def _emit(product: Contraction, operands: Operands, spaces: Spaces, tiles: dict[str, Any]) -> None:
    """The kernels of each bucket; the host chooses by the number of rows. No row, no kernel."""
    rows = operands.rows
    if is_const(rows, 0):
        T.evaluate(0)
        return

    with when(isinstance(rows, tirx.IntImm) or T.Bind(rows > 0)):
        read = in_terms(operands) if operands.terms > 1 else operands

        def emit(bucket: str) -> None:
            _emit_bucket(product, replace(read, most=spaces[bucket].most), tiles[bucket])

        emit_buckets(rows, distinct(read, spaces, tiles), emit, bound=True)


def _emit_bucket(product: Contraction, operands: Operands, tile: Tile) -> None:
    operands = operands.flat()
    kind: type[Products] = HalfProducts
    if operands.is_quantized:
        kind = int4_products(operands) if operands.is_packed else Int8Products
    partial_ = partial_sums(tile.split, operands.rows, operands.n) if tile.split > 1 else None
    with launch(operands, tile) as block:
        products = kind.allocate(block)
        for_each_stage(block, products.accumulate)
        add_up_block(product, block, products.finish(), partial_)
    if partial_ is not None:
        add_up_parts(product, operands.rows, partial_)

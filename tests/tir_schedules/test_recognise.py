"""Which orders of packed weights a product is recognised in."""

import pytest

from sits_tvm.config import QuantSpec
from tir_schedules.int4_format.packed_layout import PackedLayout
from tir_schedules.int4_format.packed_order import ORDERS
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.int8_matmul import int8_matmul
from tir_schedules.matmul.recognise import recognise

SPECS = [QuantSpec(group_size=32, symmetric=False), QuantSpec(group_size=-1)]


def products(spec, order):
    """Of float and of INT8 activations with W (40, 72)."""
    int8 = QuantSpec(group_size=spec.group_size, symmetric=spec.symmetric, activation="int8")
    yield int4_matmul(None, 40, 72, spec, "float16", order), PackedLayout(40, 72, spec, order)
    layout = PackedLayout(40, 72, int8, order)
    yield int8_matmul(None, layout, "float16"), layout


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_a_product_is_recognised_in_its_order_alone(order, spec):
    for func, layout in products(spec, order):
        for asked in ORDERS:
            assert (recognise(func, asked) is not None) == (asked == order)
        found = recognise(func, order)
        buffers = [found.rhs.codes, found.rhs.scale, found.rhs.zero_point]
        shapes = [tuple(map(int, buffer.shape)) for buffer in buffers if buffer is not None]
        assert shapes == list(layout.shapes)
        assert found.rhs.group_size == layout.group_size
        assert int(found.padded_k) == layout.padded_k


def test_kernels_of_cpus_read_vectors():
    assert recognise(int4_matmul(None, 40, 72, SPECS[0], "float32", "vectors"))
    assert not recognise(int4_matmul(None, 40, 72, SPECS[0], "float32", "fragments"))

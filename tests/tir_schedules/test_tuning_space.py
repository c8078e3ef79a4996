"""Parameters of kernels: what overrides them, what is refused, and the space they are found in."""

import json
from itertools import product

import numpy as np
import pytest
import tvm
from kernel_runs import assert_close, target
from test_int8_matmul import assert_rounded, quantized, random_weight, run_product
from test_int8_matmul import product as product_of

from sits_tvm import SitsError
from sits_tvm.config import QuantSpec
from sits_tvm.diagnostics import collect
from tir_schedules import RULES, ApplySchedules
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul
from tir_schedules.matmul.int8_matmul import int8_matmul
from tir_schedules.matmul_cpu.rule import Matmul
from tir_schedules.records.space import ATTRIBUTE, sampled, with_parameters

SPEC = QuantSpec(group_size=32)
LAYOUT = PackedLayout(100, 70, SPEC, "vectors")


def matmul(rows, n=100, k=70):
    return int4_matmul(rows, n, k, SPEC, "float32", "vectors")


def corners(space):
    """The smallest and the largest value of each parameter, in all combinations."""
    ends = [(values[0], values[-1]) for values in map(space.values, space.choices)]
    return [dict(zip(space.choices, values, strict=True)) for values in product(*ends)]


def check_corners(name, plain, rows, run, every=1):
    """`run(kernel, m)` for m in `rows`, one of each bucket, at corners of the space."""
    spaces = Matmul().spaces(plain, target(name))
    assert len(spaces) == len(rows)
    columns = [corners(space)[::every] for space in spaces.values()]
    for at in range(max(map(len, columns))):
        values = (column[at % len(column)] for column in columns)
        candidate = with_parameters(plain, dict(zip(spaces, values, strict=True)))
        scheduled = Matmul().apply(candidate, target(name), False)
        kernel = tvm.compile(scheduled.mod, target(name))["main"]
        for m in rows:
            run(kernel, m)


GENERIC = pytest.param("generic", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["host", "haswell", GENERIC])
def test_every_corner_of_the_space_computes_the_same(rng, name):
    x = rng.standard_normal((37, 70)).astype("float32")
    parts = pack(rng.standard_normal((100, 70)).astype("float32"), SPEC, "vectors")
    weight = unpack(parts, LAYOUT)

    def run(kernel, m):
        y = tvm.runtime.tensor(np.full((m, 100), np.nan, "float32"))
        kernel(*map(tvm.runtime.tensor, (x[:m], *parts)), y)
        assert_close(y.numpy(), x[:m].astype("float64") @ weight.T, x[:m], weight.T)

    check_corners(name, matmul(None), (1, 7, 37), run)


@pytest.mark.parametrize("name", ["host", "haswell", GENERIC])
def test_every_corner_of_the_space_of_int8_computes_the_same(rng, name):
    parts = random_weight(rng, LAYOUT)
    codes, scale = quantized(rng.standard_normal((37, 70)).astype("float32"), LAYOUT)

    def run(kernel, m):
        y = run_product(kernel, codes[:m], scale[:m], parts, LAYOUT)
        assert_rounded(y, *product_of(codes[:m], scale[:m], parts, LAYOUT))

    every = 5 if name == "host" else 15  # all low, all high, and two mixed
    check_corners(name, int8_matmul(None, LAYOUT, "float32"), (1, 7, 37), run, every)


def test_the_space_samples_what_the_rule_takes():
    space = Matmul().apply(matmul(9), target(), True)
    values = sampled(space.mod["main"])
    assert values.keys() == {"9+"}
    assert values["9+"].keys() == {"rows", "vectors", "panel"}
    candidate = with_parameters(matmul(9), values)
    Matmul().spaces(candidate, target())["9+"].with_values(values["9+"])
    assert json.loads(candidate.attrs[ATTRIBUTE]) == values


def test_parameters_change_the_kernel():
    texts = {
        str(Matmul().apply(with_parameters(matmul(1), {"1": {"vectors": n}}), target(), False).mod)
        for n in (1, 2, 3)
    }
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"1": {"streams": 4}}, "no parameter 'streams'; there are vectors"),
        ({"1": {"vectors": 5}}, "vectors=5; it takes"),
        ({"1": {"vectors": True}}, "vectors=True"),
        ({"9+": {"rows": 12}}, "no rows '9\\+'; there are 1"),
        ([1], "sits.parameters"),
    ],
)
def test_refuses_what_is_outside_the_space(given, word):
    with pytest.raises(SitsError, match=word):
        Matmul().apply(with_parameters(matmul(1), given), target(), False)


def test_a_build_refuses_it_too():
    mod = tvm.IRModule({"main": with_parameters(matmul(1), {"1": {"vectors": 5}})})
    with target(), collect() as found:
        ApplySchedules(*RULES)(mod)
    assert [diagnostic.code for diagnostic in found] == ["kernel-parameters"]

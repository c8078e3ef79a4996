"""The CUDA text of INT4 products, run on the host, against float64."""

import numpy as np
import pytest
from cuda_text import CudaText
from matmul_cuda_runs import (
    TARGET,
    activations,
    assert_close,
    check,
    layout_of,
    plain,
    run,
    scheduled,
    weight,
)

from sits_tvm import parse_target
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.records.space import UPPER_BOUNDS
from tir_schedules.records.workloads import MATMULS, MatmulWorkload

ROWS = (0, 1, 2, 7, 8, 9, 16, 17, 33, 65, 257)
QUICK = {(None, 32, False), (None, 128, True), ("int8", 64, False), ("int8", -1, True)}


def formats():
    for activation in (None, "int8"):
        for group_size in (32, 64, 128, -1):
            for symmetric in (True, False):
                form = activation, group_size, symmetric
                yield pytest.param(*form, marks=() if form in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("activation", "group_size", "symmetric"), formats())
def test_one_function_serves_every_number_of_rows(activation, group_size, symmetric):
    layout = layout_of(80, 328, activation, group_size=group_size, symmetric=symmetric)
    check(layout, ROWS)


@pytest.mark.parametrize("symmetric", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bfloat16(symmetric):
    check(layout_of(64, 384, group_size=64, symmetric=symmetric), ROWS, "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int4"])
def test_a_workload_has_a_function_of_its_own(dtype):
    """What is tuned, and what estimates are of."""
    rule, gpu = TensorCoreMatmul(), parse_target("cuda -arch=sm_90")
    family = MATMULS[dtype in ("int8", "int4")]
    workload = MatmulWorkload(family, 64, 256, 128, False, "float16", dtype)
    assert rule.workload(rule.prim_func(workload, 4), gpu) == workload
    assert len(rule.inputs(workload, 4, np.random.default_rng(0))) == 4 + 2 * (family != MATMULS[0])


@pytest.mark.parametrize("activation", ["int8", "int4"])
def test_parts_of_activations_that_stages_cut(activation):
    """Nine groups have a scale by three; a stage has four groups."""
    layout = layout_of(40, 288, activation, group_size=32, symmetric=False)
    check(layout, 7, **{"2-8": (1, 1, 1, 1, 1, 2, 2)})


@pytest.mark.slow
@pytest.mark.parametrize(("most", "kernels"), [(1, 1), (16, 3), (17, 4)])
def test_no_code_for_more_rows_than_there_may_be(most, kernels):
    """Which nothing checks: the last kernel is right for more, too."""
    layout = layout_of(64, 384, group_size=64)
    func = plain(layout, None).with_attr(UPPER_BOUNDS, {"m": most})
    compiled, rng = CudaText(scheduled(func), TARGET), np.random.default_rng(0)
    assert len(compiled.kernels.parameters) == kernels
    parts = weight(rng, layout)
    for rows in (0, 1, 9, most, most + 30):
        arguments, x = activations(rng, rows, layout)
        assert_close(run(compiled, arguments, parts, layout), x, parts, layout)

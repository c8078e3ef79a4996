"""Packed fragments read by the CUDA text of TVM's own schedules, run on the host."""

import numpy as np
import pytest
from cuda_text import CudaText
from kernel_runs import assert_close
from tvm.s_tir import dlight

from sits_tvm import QuantSpec, parse_target
from tir_schedules.int4_format.packing import PackedLayout, pack, unpack
from tir_schedules.matmul.int4_matmul import int4_matmul, int4_take

CUDA = parse_target("cuda -arch=sm_90")
N, K = 40, 136
SPECS = [QuantSpec(group_size=32, symmetric=False), QuantSpec(group_size=-1, activation="int8")]


def packed(rng, spec):
    parts = pack(rng.standard_normal((N, K)).astype("float32"), spec, "fragments")
    return parts, unpack(parts, PackedLayout(N, K, spec, "fragments"))


def run(rule, func, *arrays, shape, dtype):
    with CUDA:
        scheduled = rule.apply(func, CUDA, False)
    out = np.full(shape, np.nan, dtype)
    CudaText(scheduled.mod["main"], CUDA)(*arrays, out)
    return out


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_take(rng, spec):
    parts, weight = packed(rng, spec)
    ids = np.array([39, 0, 17, 8], "int64")
    func = int4_take(None, N, K, spec, "float16", "fragments")
    taken = run(dlight.gpu.Fallback(), func, ids, *parts, shape=(4, K), dtype="float16")
    np.testing.assert_array_equal(taken, weight[ids].astype("float16"))


def test_matmul(rng):
    parts, weight = packed(rng, SPECS[0])
    x = rng.standard_normal((5, K)).astype("float32")
    func = int4_matmul(None, N, K, SPECS[0], "float32", "fragments")
    y = run(dlight.gpu.Matmul(), func, x, *parts, shape=(5, N), dtype="float32")
    assert_close(y, x.astype("float64") @ weight.T, x, weight.T)

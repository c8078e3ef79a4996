"""What a run of the bundle says of the static model's order, and the records that it writes."""

import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from small_modules import one_function
from tvm import relax

import sits_tvm
from sits_tvm import Config, QuantSpec, parse_target
from tests.benchmarks.gpu_bundle import write
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.records.database import read_records
from tir_schedules.records.workloads import MatmulWorkload

sys.path.insert(0, str(Path(write.__file__).parent))
import ranking

WORKLOAD = MatmulWorkload("int4_matmul", 4096, 4096, 128, True, "float16", "float16")
TARGET = parse_target("cuda -arch=sm_90a")
BUCKETS = {4: "2-8", 1024: "257+", 4096: "257+"}


@pytest.mark.parametrize("seed", range(5))
def test_the_correlation_is_that_of_scipy_with_ties(seed):
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 6, 20), rng.integers(0, 6, 20)
    expected = scipy.stats.spearmanr(first, second).statistic
    assert ranking.spearman(first, second) == pytest.approx(expected)
    assert ranking.ranks(first).tolist() == scipy.stats.rankdata(first).tolist()


def test_an_order_that_is_none_has_no_number():
    assert ranking.spearman([1, 2], [1, 2]) is None
    assert ranking.spearman([1, 1, 1], [1, 2, 3]) is None
    assert ranking.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert ranking.spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)


def tiles():
    """Three for each range of rows: the default, one with fewer stages, one without wgmma."""
    rule = TensorCoreMatmul()
    spaces = rule.spaces(rule.prim_func(WORKLOAD, None), TARGET)
    for name, change in {"default": {}, "stages": {"stages": 2}, "warps": {"wgmma": 0}}.items():
        yield name, {rows: asdict(s.with_values(change)) for rows, s in spaces.items()}


def ran(seconds):
    """(manifest, results) of cases that take `seconds` by name and rows; estimated: in order."""
    cases, times = [], []
    for number, (name, by_rows) in enumerate(tiles()):
        estimates = {str(rows): (number + 1) * 1e-6 for rows in BUCKETS}
        case = {"name": name, "workload": asdict(WORKLOAD), "is_default": name == "default"}
        cases.append({**case, "estimates": estimates})
        times += [
            {"case": name, "rows": rows, "bucket": bucket, "tile": by_rows[bucket],
             "seconds": seconds[name, rows]}
            for rows, bucket in BUCKETS.items()
        ]  # fmt: skip
    manifest = {"arch": "sm_90a", "cases": cases, "record": write.record_of(TARGET)}
    return manifest, {"device": "NVIDIA H200", "times": times}


SECONDS = {
    **{("default", rows): 2e-6 for rows in BUCKETS},
    **{("stages", 4): 1e-6, ("stages", 1024): 3e-6, ("stages", 4096): 1e-6},
    **{("warps", rows): 4e-6 for rows in BUCKETS},
}


def test_tiles_of_one_product_are_compared_by_rows():
    manifest, results = ran(SECONDS)
    found = ranking.correlations(manifest, results["times"])
    assert found["tiles of int4_matmul 4096x4096, 1024 rows"] == pytest.approx(1)
    assert found["tiles of int4_matmul 4096x4096, 4 rows"] == pytest.approx(0.5)
    assert found["default tiles, 4 rows"] is None
    assert -1 < found["all"] < 1


def test_records_are_read_as_those_of_tune(tmp_path):
    """One for each range of rows, of the fewest that were timed: 1024 for the last one."""
    manifest, results = ran(SECONDS)
    lines = ranking.records(manifest, results, 132)
    ranking.write_database(tmp_path, "sm_90a", lines)
    records = read_records(tmp_path, "sm_90a")
    assert {rows for _, rows in records} == {"2-8", "257+"}
    few, many = records[WORKLOAD, "2-8"], records[WORKLOAD, "257+"]
    assert (few.parameters["stages"], few.seconds, few.default_seconds) == (2, 1e-6, 2e-6)
    assert (many.seconds, many.default_seconds) == (2e-6, 2e-6)
    assert (few.ranked, few.device, few.cores, few.trials) == ("measured", "NVIDIA H200", 132, 3)


def test_a_build_takes_them(tmp_path):
    manifest, results = ran(SECONDS)
    ranking.write_database(tmp_path, "sm_90a", ranking.records(manifest, results, 132))
    types = [relax.TensorType(shape, "float16") for shape in ((1024, 4096), (4096, 4096))]
    mod = one_function(
        lambda bb, x, w: bb.emit(relax.op.matmul(x, relax.op.permute_dims(w))), *types, num_input=1
    )
    config = Config(quant=QuantSpec(), database=tmp_path)
    _, report = sits_tvm.lower(mod, "cuda -arch=sm_90a", config=config)
    (kernel,) = [kernel for kernel in report.kernels if kernel.family == "TensorCoreMatmul"]
    assert (kernel.tuned_rows, kernel.tuned_by) == (("257+",), ("measured",))

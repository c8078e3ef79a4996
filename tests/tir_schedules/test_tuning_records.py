"""The tuning database: kernels find their records, and nothing in a file makes a wrong kernel."""

import os
from dataclasses import replace

import pytest
import tvm
from kernel_runs import assert_close, target

from sits_tvm import parse_target
from sits_tvm.config import QuantSpec
from sits_tvm.diagnostics import collect
from sits_tvm.target import host_mismatch
from tir_schedules import RULES, ApplyRecords, tuned_rows
from tir_schedules.int4_format.packing import PackedLayout, unpack
from tir_schedules.matmul_cpu.rule import Matmul
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.records import apply_records
from tir_schedules.records.database import SHIPPED, Record, arch_of, read_records, write_records
from tir_schedules.records.space import chosen, rule_of
from tir_schedules.records.workloads import MatmulWorkload

WORKLOAD = MatmulWorkload("int4_matmul", 100, 70, 32, True, "float16", "float32")
ONE = Record(
    WORKLOAD, "1", {"vectors": 2}, "measured", "a CPU", 2, "2026-11-30", "0.27.0", 6, 1e-5, 2e-5
)
FIVE = replace(ONE, parameters={"vectors": 5})
MORE = replace(ONE, rows="9+", parameters={"rows": 4, "vectors": 2, "panel": 6})


@pytest.fixture(autouse=True)
def no_shipped_records(monkeypatch, tmp_path):
    monkeypatch.setattr(apply_records, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shipped"


def found(rows, database=None, workload=WORKLOAD, name="haswell"):
    """(parameters by bucket, diagnostics) of the kernel of a workload after the look-up."""
    func = Matmul().prim_func(workload, rows)
    with target(name), collect() as diagnostics:
        func = ApplyRecords(RULES, database)(tvm.IRModule({"main": func}))["main"]
    return chosen(func, Matmul().spaces(func, target(name))), tuned_rows(func), diagnostics


def write(database, *records, arch="haswell"):
    write_records(database, arch, records)
    return database


def test_records_read_back(tmp_path):
    write(tmp_path, ONE, MORE)
    assert read_records(tmp_path, "haswell") == {(WORKLOAD, "1"): ONE, (WORKLOAD, "9+"): MORE}
    assert read_records(tmp_path, "znver4") == {}
    assert [path.name for path in (tmp_path / "haswell").iterdir()] == ["int4_matmul.jsonl"]


def test_two_processes_write_at_once(tmp_path, monkeypatch):
    """The other one does, before this one has put its file in place."""
    replace_ = os.replace

    def late(new, path):
        with monkeypatch.context() as other:
            other.setattr(os, "replace", replace_)
            other.setattr(os, "getpid", lambda: 1)
            write(tmp_path, MORE)
        replace_(new, path)

    monkeypatch.setattr(os, "replace", late)
    write(tmp_path, ONE)
    assert read_records(tmp_path, "haswell") == {(WORKLOAD, "1"): ONE}


def test_each_range_of_rows_is_looked_up_on_its_own(tmp_path):
    parameters, tuned, _ = found(None, write(tmp_path, ONE))
    assert tuned == ("1",)
    assert parameters["1"].vectors == 2
    assert parameters["9+"] == found(None)[0]["9+"]
    assert found(9, write(tmp_path, ONE))[1] == ()
    parameters, tuned, _ = found(9, write(tmp_path, ONE, MORE))
    assert tuned == ("9+",)
    assert (parameters["9+"].rows, parameters["9+"].vectors, parameters["9+"].panel) == (4, 2, 6)


def test_a_users_own_database_comes_first(tmp_path, no_shipped_records):
    write(no_shipped_records, ONE, replace(MORE, parameters={"rows": 2}))
    write(tmp_path / "own", replace(ONE, parameters={"vectors": 3}))
    parameters, tuned, diagnostics = found(None, tmp_path / "own")
    assert set(tuned) == {"1", "9+"}
    assert (parameters["1"].vectors, parameters["9+"].rows) == (3, 2)
    assert diagnostics == []


@pytest.mark.parametrize(
    "change",
    [{"n": 101}, {"k": 71}, {"group_size": 64}, {"symmetric": False}, {"scale_dtype": "float32"},
     {"dtype": "float16"}],
)  # fmt: skip
def test_another_workload_is_not_tuned(tmp_path, change):
    assert found(1, write(tmp_path, ONE), replace(WORKLOAD, **change))[1] == ()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"),
        ("[]", "format"),
        ("[" * 100_000, "recursion"),
        (ONE.to_json("haswell").replace('"format": 3', '"format": 2'), "format 2"),
        (ONE.to_json("znver4"), "'znver4' in the folder of 'haswell'"),
        (ONE.to_json("haswell").replace('"n": 100', '"n": "100"'), "n is '100'"),
        (ONE.to_json("haswell").replace('"n": 100, ', ""), "n is None"),
        (ONE.to_json("haswell").replace('"ranked"', '"rank"'), "rank"),
        (ONE.to_json("haswell").replace("int4_matmul", "int3_matmul"), "family is 'int3_matmul'"),
        (ONE.to_json("haswell").replace('{"vectors": 2}', "7"), "parameters is 7"),
        (ONE.to_json("haswell")[:-20], "line 2"),
        ("\x00", "line 2"),
    ],
)
def test_a_damaged_or_foreign_file_is_an_error(tmp_path, line, word):
    write(tmp_path, MORE)
    with (tmp_path / "haswell" / "int4_matmul.jsonl").open("a") as file:
        file.write(line + "\n")
    _, tuned, diagnostics = found(1, tmp_path)
    assert tuned == ()
    (error,) = diagnostics
    assert (error.severity, error.code) == ("error", "database-unreadable")
    assert "int4_matmul.jsonl, line 2" in error.message
    assert word in error.message


def test_a_database_of_another_architecture_is_a_warning(tmp_path):
    _, tuned, (warning,) = found(1, write(tmp_path, ONE, arch="znver4"))
    assert tuned == ()
    assert (warning.severity, warning.code) == ("warning", "database-other-arch")
    assert "records of znver4" in warning.message


def test_an_empty_file_is_no_database_of_its_architecture(tmp_path):
    (tmp_path / "haswell").mkdir()
    (tmp_path / "haswell" / "int4_matmul.jsonl").touch()
    (warning,) = found(1, tmp_path)[2]
    assert warning.message.endswith("has none for haswell: it holds no records")
    (warning,) = found(1, write(tmp_path, ONE, arch="znver4"))[2]
    assert warning.message.endswith("has none for haswell: it holds records of znver4")


def test_a_record_of_rows_that_are_no_range_is_not_used(tmp_path):
    """Nor is one of a range that a kernel with fewer rows does not have, but that is as it must."""
    write(tmp_path, ONE, MORE, replace(ONE, rows="2-16"))
    for rows, expected in {None: ("1", "9+"), 1: ("1",)}.items():
        _, tuned, (warning,) = found(rows, tmp_path)
        assert tuned == expected
        assert (warning.severity, warning.code) == ("warning", "database-outdated")
        assert "2-16 rows, is not used: there are no such rows, but 1, 2-8, 9+" in warning.message


def test_a_database_that_is_not_there_is_an_error(tmp_path):
    _, _, (error,) = found(1, tmp_path / "nowhere")
    assert (error.severity, error.code) == ("error", "database-missing")


def test_a_record_outside_the_space_is_not_used(tmp_path):
    parameters, tuned, (warning,) = found(1, write(tmp_path, FIVE))
    assert tuned == ()
    assert parameters == found(1)[0]
    assert (warning.severity, warning.code) == ("warning", "database-outdated")
    assert "vectors=5" in warning.message
    assert str(WORKLOAD) in warning.message


def test_a_record_that_has_no_kernel_is_not_used(tmp_path):
    """Each of its values is one of the space; together they leave no shared memory."""
    workload = replace(WORKLOAD, dtype="float16")
    large = {"tokens": 16, "warps_m": 4, "units": 8, "stages": 8}
    write(tmp_path, replace(ONE, workload=workload, rows="33-64", parameters=large), arch="sm_90")
    func = TensorCoreMatmul().prim_func(workload, 64)
    with parse_target("cuda -arch=sm_90") as gpu, collect() as diagnostics:
        func = ApplyRecords(RULES, tmp_path)(tvm.IRModule({"main": func}))["main"]
        assert TensorCoreMatmul().apply(func, gpu, False) is not None
    (warning,) = diagnostics
    assert (warning.severity, warning.code) == ("warning", "database-outdated")
    assert "bytes of shared memory" in warning.message
    assert tuned_rows(func) == ()


SHIPPED_RECORDS = [
    (folder.name, record)
    for folder in sorted(SHIPPED.glob("*/"))
    for record in read_records(SHIPPED, folder.name).values()
    if not folder.name.startswith("sm_")  # those have tests of their own
]
SMALLEST = sorted(SHIPPED_RECORDS, key=lambda pair: pair[1].workload.n * pair[1].workload.k)[:3]


def of_shipped(arch, record, rows):
    """(rule, function, target) of a record."""
    rule = rule_of(RULES, record.workload.family, "llvm")
    kernel_target = parse_target(f"llvm -mcpu={arch} -num-cores=2")
    with kernel_target, collect() as diagnostics:
        mod = tvm.IRModule({"main": rule.prim_func(record.workload, rows)})
        func = ApplyRecords(RULES)(mod)["main"]
    assert diagnostics == []
    return rule, func, kernel_target


@pytest.mark.parametrize(("arch", "record"), SHIPPED_RECORDS, ids=str)
def test_every_shipped_record_is_found(monkeypatch, arch, record):
    monkeypatch.setattr(apply_records, "SHIPPED", SHIPPED)
    rule, func, kernel_target = of_shipped(arch, record, None)
    assert arch_of(kernel_target) == arch
    assert record.rows in tuned_rows(func)
    spaces = rule.spaces(func, kernel_target)
    assert chosen(func, spaces)[record.rows] == spaces[record.rows].with_values(record.parameters)


def assert_right(y, workload, inputs):
    """Against float64, whatever the order of the bytes of a word of INT8 codes."""
    spec = QuantSpec(group_size=workload.group_size, symmetric=workload.symmetric)
    x, parts = inputs[0], inputs[3 if workload.dtype == "int8" else 1 :]
    weight = unpack(parts, PackedLayout(workload.n, workload.k, spec, "vectors")).astype("float64")
    if workload.dtype == "int8":
        words, scale = inputs[:2]
        in_order = words.view("int8").reshape(len(words), -1, 2, 4).swapaxes(2, 3)
        groups = in_order.reshape(*scale.shape, -1) * scale[..., None].astype("float64")
        x = groups.reshape(len(words), -1)[:, : workload.k]
    assert_close(y, x.astype("float64") @ weight.T, x, weight.T)


@pytest.mark.parametrize(("arch", "record"), SMALLEST, ids=str)
def test_shipped_records_compute_right_results(monkeypatch, rng, arch, record):
    monkeypatch.setattr(apply_records, "SHIPPED", SHIPPED)
    rule, func, kernel_target = of_shipped(arch, record, None)
    kernel = tvm.compile(rule.apply(func, kernel_target, False).mod, kernel_target)["main"]
    if host_mismatch(kernel_target):
        return  # compiled, which is what this machine can do
    for m in (1, 19, 40):
        inputs = rule.inputs(record.workload, m, rng)
        y = tvm.runtime.empty(
            (m, record.workload.n), record.workload.dtype.replace("int8", "float32")
        )
        kernel(*map(tvm.runtime.tensor, inputs), y)
        assert_right(y.numpy(), record.workload, inputs)

"""The parameters of attention kernels: every choice computes the same, and a record finds them."""

import numpy as np
import pytest
import tvm
from attention_runs import call, compile_attention, reference, symbolic_types
from kernel_runs import target
from test_tuning_space import corners
from tvm import tirx

from sits_tvm import SitsError, parse_target
from sits_tvm.diagnostics import collect
from tir_schedules import RULES, ApplyRecords, ApplySchedules, tuned_rows
from tir_schedules.attention.rule import Attention, attention_kernel
from tir_schedules.records import apply_records
from tir_schedules.records.database import Record, write_records
from tir_schedules.records.space import sampled, with_parameters
from tir_schedules.records.workloads import AttentionWorkload

B, S, T = (tirx.Var(name, "int64") for name in "bst")


def attention(queries=S, keys=T, batch=B, heads=(16, 4), width=64, bias=None, name="host", **kind):
    """The function without a schedule, on float32."""
    shapes = [(batch, heads[0], queries, width), *[(batch, heads[1], keys, width)] * 2]
    types = [(shape, "float32") for shape in shapes]
    func = attention_kernel(call([*types, *([bias] if bias else [])], **kind), target(name))
    assert isinstance(func, tirx.PrimFunc), func
    return func


def operands(rng, queries, keys, bias):
    """7 query heads on one, D = 12 and Dv = 7; the bias hides 4 of 10 keys, all from query 2."""
    shapes = (2, 14, queries, 12), (2, 2, keys, 12), (2, 2, keys, 7)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    if bias is None:
        return arrays
    shown = rng.random((2, 1, queries, keys)) < 0.6
    shown[:, :, 2:3] = False
    values = np.where(shown, rng.standard_normal(shown.shape), -np.inf)
    return [*arrays, shown if bias == "bool" else values.astype(bias)]


def one_by_one(space):
    """Every value of each parameter, with defaults for the others."""
    default = space.default_values
    return [{**default, field: value} for field in default for value in space.values(field)]


def check(rng, name, choices, bias, **kind):
    """Kernels with each of the choices for one query and for more, at odd lengths."""
    lengths = [(1, 300), (1, 1), (1, 0), (5, 70), (37, 300)]
    cases = [operands(rng, *length, bias) for length in lengths]
    types = symbolic_types(cases[-1])
    func = attention_kernel(call(types, **kind), target(name))
    spaces = Attention().spaces(func, target(name))
    assert list(spaces) == ["1", "2+"]
    few, many = map(choices, spaces.values())
    for at in range(max(len(few), len(many))):
        parameters = {"1": few[at % len(few)], "2+": many[at % len(many)]}
        run = compile_attention(types, name, parameters, **kind)
        for arrays in cases:
            expected = reference(*arrays, **kind)
            np.testing.assert_allclose(
                run(*arrays), expected, atol=3e-6, rtol=2e-6, err_msg=f"{parameters}"
            )


KINDS = [
    (None, {"causal": "bottom_right", "window": 150, "empty_row": "uniform"}),
    ("bool", {"softcap": 3.0, "empty_row": "zero"}),
    ("float32", {"causal": -2, "empty_row": "nan"}),
]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "bias", "kind"),
    [
        ("host", *KINDS[0]),
        pytest.param("haswell", *KINDS[1], marks=SLOW),
        pytest.param("host", *KINDS[1], marks=SLOW),
        pytest.param("host", *KINDS[2], marks=SLOW),
        pytest.param("generic", *KINDS[2], marks=SLOW),
    ],
)
def test_every_corner_of_the_space_computes_the_same(rng, name, bias, kind):
    check(rng, name, corners, bias, **kind)


@SLOW
def test_every_choice_computes_the_same(rng):
    bias, kind = KINDS[1]
    check(rng, "host", one_by_one, bias, **kind)


def buckets(name="host", **form):
    return list(Attention().spaces(attention(name=name, **form), target(name)))


def test_each_number_of_queries_has_one_kernel():
    """Few rows are queries of all heads of a group; of static ones the number is known."""
    assert buckets() == ["1", "2+"]
    assert buckets(queries=1) == ["1"]
    assert buckets(queries=2) == ["2"]
    assert buckets(queries=3) == ["2+"]
    assert buckets(queries=0) == ["2+"]
    assert buckets(heads=(9, 1)) == ["1+"]
    assert buckets(heads=(9, 1), queries=1) == ["1+"]


def test_no_more_rows_side_by_side_than_there_are():
    """A record for many rows holds for few as well."""
    func = with_parameters(attention(queries=5, heads=(4, 2)), {"2+": {"vectors": 4}})
    one = with_parameters(attention(queries=5, heads=(4, 2)), {"2+": {"vectors": 1}})
    texts = [str(Attention().apply(f, target(), False).mod["main"].body) for f in (func, one)]
    assert texts[0] == texts[1]


def workload(**form):
    return Attention().workload(attention(**form), target())


def test_a_workload_is_all_but_batch_and_lengths():
    assert workload(queries=5, keys=9, batch=3) == workload() == workload(scale=1.0)
    assert workload(causal=0) == workload(causal="bottom_right", empty_row="zero")
    forms = [
        {}, {"heads": (16, 2)}, {"heads": (8, 4)}, {"width": 32}, {"causal": 0}, {"window": 9},
        {"softcap": 2.0}, {"bias": ((T,), "float32")}, {"bias": ((T,), "bool")},
        {"bias": ((S, T), "bool")},
    ]  # fmt: skip
    assert len({workload(**form) for form in forms}) == len(forms)


@pytest.mark.parametrize("form", [{}, {"causal": 0, "window": 9}, {"bias": ((S, T), "bool")},
                                  {"bias": ((T,), "float16"), "softcap": 2.0}])  # fmt: skip
@pytest.mark.parametrize("rows", [None, 512])
def test_a_workload_gives_a_function_of_it(form, rows):
    known = workload(**form)
    func = Attention().prim_func(known, rows)
    assert Attention().workload(func, target()) == known


def test_the_space_samples_what_the_rule_takes():
    space = Attention().apply(attention(queries=9), target(), True)
    values = sampled(space.mod["main"])
    assert {rows: list(fields) for rows, fields in values.items()} == {
        "2+": ["depth", "vectors", "keys"]
    }
    assert Attention().apply(with_parameters(attention(queries=9), values), target(), False)


def test_refuses_what_is_outside_the_space():
    func = with_parameters(attention(queries=9), {"2+": {"keys": 8}})
    with pytest.raises(SitsError, match="keys=8; it takes"):
        Attention().apply(func, target(), False)


def test_a_record_is_found(tmp_path, monkeypatch):
    """For one query, whatever the batch; a build tells where the parameters come from."""
    monkeypatch.setattr(apply_records, "SHIPPED", tmp_path / "shipped")
    record = Record(
        workload(causal=0), "1", {"registers": 8, "keys": 32},
        "measured", "a CPU", 2, "2026-11-30", "0.27.0", 6, 1e-5, 2e-5,
    )  # fmt: skip
    assert isinstance(record.workload, AttentionWorkload)
    write_records(tmp_path, "haswell", [record])
    assert [path.name for path in (tmp_path / "haswell").iterdir()] == ["attention.jsonl"]
    mod = tvm.IRModule({"main": attention(batch=2, name="haswell", causal=3)})
    with target("haswell"), collect() as diagnostics:
        found = ApplyRecords(RULES, tmp_path)(mod)
        scheduled = ApplySchedules(*RULES)(found)["main"]
    assert diagnostics == []
    assert tuned_rows(scheduled) == ("1",)
    assert scheduled.attrs["sits.rule"] == "Attention"
    default = Attention().apply(mod["main"], target("haswell"), False).mod["main"]
    assert str(default.body) != str(scheduled.body)


def test_kernels_for_cuda_are_not_tuned():
    assert Attention().workload(attention(), parse_target("cuda -arch=sm_90")) is None

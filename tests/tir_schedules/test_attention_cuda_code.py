"""The CUDA attention kernel as machine code for sm_90: both products on tensor cores, no spills."""

import pytest
import tvm
from attention_cuda_runs import TARGET, kernel, symbolic_types

from sits_tvm.device_code import compile_device_code, find_toolkit, record_launches

pytestmark = pytest.mark.skipif(find_toolkit() is None, reason="pip install 'sits_tvm[cuda]'")


def build(forms):
    """The report's row of every kernel, in the order of `forms`."""
    functions = {
        f"form{i}": kernel(symbolic_types(**form), **attributes).with_attr(
            {"global_symbol": f"form{i}", "tirx.is_scheduled": True}
        )
        for i, (form, attributes) in enumerate(forms)
    }
    with record_launches() as launches:
        executable = tvm.compile(tvm.IRModule(functions), target=TARGET)
    rows = compile_device_code(executable, "sm_90", launches).kernels
    return sorted(rows, key=lambda row: row.name)


FORMS = [
    ({"heads": (16, 4), "width": 64}, {"causal": 0}),
    (
        {"heads": (32, 8), "width": 128, "dtype": "bfloat16"},
        {"causal": "bottom_right", "window": 1024},
    ),
]
BIASED = [
    (
        {"heads": (14, 2), "width": 64, "dtype": "bfloat16", "bias": ("b1qk", "bool")},
        {"causal": 0, "empty_row": "zero"},
    ),
    (
        {"heads": (4, 1), "width": 256, "dtype": "bfloat16", "bias": ("b1qk", "float32")},
        {"softcap": 50.0, "empty_row": "uniform"},
    ),
]
# Width: per tile and warp two products of 16 rows and as many keys; bytes of queries, keys, values
MMA = {64: 64, 128: 128, 256: 128}
SHARED = {64: 27648, 128: 52224, 256: 67584}


@pytest.fixture(
    scope="module",
    params=[FORMS, pytest.param(BIASED, marks=pytest.mark.slow)],
    ids=["causal", "biased"],
)
def built(request):
    """(D, kernel) of every form."""
    widths = [form["width"] for form, _ in request.param]
    return list(zip(widths, build(request.param), strict=True))


def test_both_products_run_on_tensor_cores(built):
    for width, row in built:
        assert row.loop_sass["HMMA"] == MMA[width]
        assert row.sass["CALL"] == 0


def test_nothing_is_spilled(built):
    for _, row in built:
        assert (row.spills, row.sass["LDL"], row.sass["STL"]) == (0, 0, 0)


def test_operands_arrive_by_asynchronous_wide_copies(built):
    for _, row in built:
        assert row.sass["LDGSTS.E.BYPASS.128"] > 0
        assert row.loop_sass["LDSM.16.M88.4"] > 0
        assert row.loop_sass["LDSM.16.MT88.4"] > 0


def test_shared_memory_holds_one_tile_of_keys_and_of_values(built):
    for width, row in built:
        assert row.dynamic_smem == SHARED[width]

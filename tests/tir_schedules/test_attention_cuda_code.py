"""The CUDA attention kernel as machine code for sm_90: the right units, no spills."""

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


HALF = [
    ({"heads": (16, 4), "width": 64}, {"causal": 0}),
    (
        {"heads": (32, 8), "width": 128, "dtype": "bfloat16"},
        {"causal": "bottom_right", "window": 1024},
    ),
]
BIASED = [
    (
        {"heads": (14, 2), "width": 72, "dtype": "bfloat16", "bias": ("b1qk", "bool")},
        {"causal": 0, "empty_row": "zero"},
    ),
    (
        {"heads": (4, 1), "width": 256, "dtype": "bfloat16", "bias": ("b1qk", "float32")},
        {"softcap": 50.0, "empty_row": "uniform"},
    ),
]
SINGLE = [({"heads": (16, 4), "width": 64, "dtype": "float32"}, {"causal": 0})]
SINGLE_WIDE = [
    (
        {"heads": (32, 8), "width": 128, "dtype": "float32"},
        {"causal": "bottom_right", "window": 1024},
    ),
    (
        {"heads": (4, 1), "width": 256, "dtype": "float32", "bias": ("b1qk", "float32")},
        {"softcap": 50.0, "empty_row": "uniform"},
    ),
]
# Width: per tile and warp two products of 16 rows and as many keys; bytes of queries, keys, values
MMA = {64: 64, 72: 76, 128: 128, 256: 128}
SHARED = {64: 27648, 72: 33792, 128: 52224, 256: 67584}
SINGLE_SHARED = {64: 52224, 128: 67584, 256: 133120}


def all_of(quick, slow):
    """A fixture of (D, kernel) of every form."""
    params = [quick, pytest.param(slow, marks=pytest.mark.slow)]

    @pytest.fixture(scope="module", params=params, ids=["quick", "slow"])
    def built(request):
        widths = [form["width"] for form, _ in request.param]
        return list(zip(widths, build(request.param), strict=True))

    return built


half, single = all_of(HALF, BIASED), all_of(SINGLE, SINGLE_WIDE)


def test_both_products_run_on_tensor_cores(half):
    for width, row in half:
        assert row.loop_sass["HMMA"] == MMA[width]
        assert row.sass["CALL"] == 0


def test_nothing_is_spilled(half):
    for _, row in half:
        assert (row.spills, row.sass["LDL"], row.sass["STL"]) == (0, 0, 0)


def test_operands_arrive_by_asynchronous_wide_copies(half):
    for _, row in half:
        assert row.sass["LDGSTS.E.BYPASS.128"] > 0
        assert row.loop_sass["LDSM.16.M88.4"] > 0
        assert row.loop_sass["LDSM.16.MT88.4"] > 0


def test_shared_memory_holds_one_tile_of_keys_and_of_values(half):
    for width, row in half:
        assert row.dynamic_smem == SHARED[width]


def test_float32_is_multiplied_in_float32(single):
    """32 or 64 keys by two rows of a lane: scores in a loop of four dimensions, then results."""
    for width, row in single:
        keys = 64 if width == 64 else 32
        assert row.loop_sass["FFMA"] == keys // 4 * 2 * 4
        assert row.loop_sass["LDS.128"] == keys // 4 + 2
        assert row.sass["FFMA"] >= row.loop_sass["FFMA"] + keys * width // 2
        assert (row.sass["HMMA"], row.sass["CALL"]) == (0, 0)


def test_float32_stays_in_registers_and_moves_16_bytes_at_once(single):
    for width, row in single:
        assert (row.spills, row.sass["LDL"], row.sass["STL"]) == (0, 0, 0)
        assert row.registers < 255
        assert row.dynamic_smem == SINGLE_SHARED[width]
        assert row.sass["LDGSTS.E.BYPASS.128"] > 0
        assert row.sass["STG.E.128"] == width // 8

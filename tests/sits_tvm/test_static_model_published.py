"""The static model explains what others found on devices, and puts a GEMV of dlight behind them."""

import pytest
from cuda_sources import needs_nvcc
from dlight_gemv import dlight_gemv
from int4_yardsticks import YARDSTICKS, yardstick_demand, yardstick_launch

from sits_tvm.device_code.sass_loops import times_executed
from sits_tvm.device_code.sass_pipes import demand, opcode_counts
from sits_tvm.tuning.static_constants import A100, H100, H200
from sits_tvm.tuning.static_model import estimate, is_tie
from sits_tvm.tuning.static_rejections import rejections

SHAPES = [(6144, 4096), (28672, 4096), (10240, 8192), (57344, 8192)]


def of(name, n, k, rows, device, mma=None, blocks=None, decoders=None):
    """The estimate of a published kernel; `decoders` of its warps decode (the others copy)."""
    stick = YARDSTICKS[name]
    blocks = blocks or n // stick.columns * -(-rows // stick.rows)
    tiles = -(-rows // stick.rows)
    weights = n * k * tiles / (blocks * 32 * (decoders or stick.warps))
    found = yardstick_demand(stick, weights, device.arch, mma)
    return estimate(found, yardstick_launch(stick, n, k, rows, blocks), device)


@pytest.mark.parametrize(("n", "k"), SHAPES[1:])
@pytest.mark.parametrize(("tile", "rows"), [("", 64), (", 128 rows", 256), (", 128 rows", 1024)])
def test_qserve_prefers_per_channel_on_a100(n, k, tile, rows):
    """So its README says of serving batches on such devices: scales of groups cost instructions."""
    per_channel, per_group = [
        of(f"QServe{tile}{kind}", n, k, rows, A100) for kind in ("", ", g128")
    ]
    assert per_channel.seconds < per_group.seconds
    assert not is_tie(per_channel, per_group)
    assert per_group.bound == "issue"


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("tile", "rows"), [("", 1), ("", 32), (", 128 rows", 128)])
def test_qserve_per_channel_is_never_slower(n, k, tile, rows):
    """Of few rows both may wait for memory."""
    per_channel, per_group = [
        of(f"QServe{tile}{kind}", n, k, rows, A100) for kind in ("", ", g128")
    ]
    assert per_channel.seconds < per_group.seconds


@pytest.mark.parametrize("device", [H100, H200])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_cutlass_55_is_slower_without_reordering(n, k, device):
    """By far for few rows, where products are 16 columns wide and decoding is the same; for 128
    rows the tensor cores hide it but for less than a tenth: order right, but a tie."""
    for rows, mma in [(16, "HGMMA.64x16x16.F32.BF16"), (128, None)]:
        shuffled, plain = [
            of(f"CUTLASS 55, {kind}", n, k, rows, device, mma, decoders=8)
            for kind in ("shuffled", "not shuffled")
        ]
        assert shuffled.seconds < plain.seconds
        assert plain.bound == "issue"
        assert is_tie(shuffled, plain) == (rows == 128)


def test_issue_load_of_memory_time_is_that_of_the_survey():
    """Marlin 74 % on H200, 51 % on H100; QQQ 30 and 21 %: instructions per weight over budget."""
    for name, shares in [("Marlin", (74, 51)), ("QQQ", (30, 21)), ("QServe, g128", (136, 95))]:
        stick = YARDSTICKS[name]
        for device, share in zip((H200, H100), shares, strict=True):
            blocks = device.sms * 4
            weights = 1 << 15
            n_k = weights * blocks * 32 * stick.warps
            launch = yardstick_launch(stick, n_k // 4096, 4096, 0, blocks)
            found = estimate(yardstick_demand(stick, weights, device.arch), launch, device).terms
            assert 100 * found["issue"] / found["hbm"] == pytest.approx(share, abs=1.5)


@needs_nvcc
def test_the_gemv_kernel_of_dlight_is_behind_marlin():
    code, launch = dlight_gemv()
    times = times_executed(code)
    needed = demand(opcode_counts(code, times), "sm_90")
    assert needed.unknown == {}
    ours, marlin = estimate(needed, launch), of("Marlin", 4096, 4096, 1, H200, blocks=132)
    assert marlin.seconds < ours.seconds
    assert not is_tie(marlin, ours)
    assert ours.bound in ("issue", "alu")
    weights = 4096 * 4096 // (launch.blocks * launch.threads)
    assert needed.instructions / weights > 3 * YARDSTICKS["Marlin"].per_weight
    reasons = rejections(code, times, launch, spills=0, weight_bytes=4096 * 2048, most_blocks=4096)
    assert [reason.partition(" move")[0] for reason in reasons] == ["128-bit loads"]

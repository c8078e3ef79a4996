"""What opcodes ask of an SM, against figures from NVIDIA's data sheets and tables."""

import pytest
from sass_text import sass

from sits_tvm.device_code.sass_pipes import demand, multiply_adds, opcode_counts, width


def pipes(opcode, arch="sm_90"):
    found = dict(demand({opcode: 1}, arch).cycles)
    assert found.pop("issue") == 1 / 4
    return found


@pytest.mark.parametrize(
    ("opcode", "ampere", "hopper"),
    [
        ("LOP3.LUT", {"alu": 1 / 2}, {"alu": 1 / 2}),
        ("PRMT", {"alu": 1 / 2}, {"alu": 1 / 2}),
        ("FFMA.FTZ", {"fma": 1 / 2}, {"fma": 1 / 4}),
        ("IMAD.WIDE.U32", {"fma": 1 / 2}, {"fma": 1 / 4, "fma_heavy": 1 / 2}),
        ("HFMA2.MMA", {"half": 1 / 4}, {"fma": 1 / 4}),
        ("MUFU.RCP", {"xu": 2}, {"xu": 2}),
        ("DFMA", {"fp64": 1}, {"fp64": 1 / 2}),
        ("LDS.128", {"lsu": 1, "l1": 4}, {"lsu": 1, "l1": 4}),
        ("LDS.U8", {"lsu": 1, "l1": 1}, {"lsu": 1, "l1": 1}),
        ("LDSM.16.MT88.4", {"lsu": 1, "l1": 4}, {"lsu": 1, "l1": 4}),
        ("SHFL.BFLY", {"lsu": 1}, {"lsu": 1}),
        ("BAR.SYNC.DEFER_BLOCKING", {}, {}),
        ("ULDC.64", {}, {}),
    ],
)
def test_results_per_clock_of_the_guide(opcode, ampere, hopper):
    assert pipes(opcode, "sm_80") == ampere
    assert pipes(opcode, "sm_90") == pipes(opcode, "sm_90a") == hopper


@pytest.mark.parametrize(
    ("opcode", "arch", "shape", "tera", "sms", "clock"),
    [
        ("HMMA.16816.F32", "sm_80", (16, 8, 16), 312, 108, 1.41e9),
        ("HMMA.1688.F32.TF32", "sm_80", (16, 8, 8), 156, 108, 1.41e9),
        ("IMMA.16832.S8.S8", "sm_80", (16, 8, 32), 624, 108, 1.41e9),
        ("IMMA.16864.S4.S4", "sm_80", (16, 8, 64), 1248, 108, 1.41e9),
        ("HGMMA.64x128x16.F32", "sm_90a", (16, 128, 16), 989, 132, 1.83e9),
        ("IGMMA.64x64x32.S8.S8", "sm_90a", (16, 64, 32), 1979, 132, 1.83e9),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "sm_90a", (16, 128, 32), 1979, 132, 1.83e9),
    ],
)
def test_tensor_cores_reach_the_peak_of_the_data_sheet(opcode, arch, shape, tera, sms, clock):
    """A warp's part of a 64-row product of a warpgroup is 16 rows."""
    m, n, k = shape
    assert multiply_adds(opcode) == m * n * k
    seconds = pipes(opcode, arch)["tensor"] / clock
    assert 2 * m * n * k * sms / seconds / 1e12 == pytest.approx(tera, rel=2e-3)


def test_mma_sync_has_three_quarters_of_hoppers_peak():
    assert pipes("HMMA.16816.F32")["tensor"] == pipes("HGMMA.64x8x16.F32")["tensor"] / 0.75


@pytest.mark.parametrize(
    ("opcode", "bytes_"), [("HGMMA.64x128x16.F32", 4096), ("IGMMA.64x64x32.S8.S8", 2048)]
)
def test_a_warpgroup_reads_its_right_factor_once(opcode, bytes_):
    """n k elements, of two bytes and of one, for four warps."""
    assert 4 * pipes(opcode, "sm_90a")["l1"] == bytes_ / 128


@pytest.mark.parametrize(
    "opcode", ["UTMALDG.2D", "HMMA.SP.16832.F32", "IMMA.16864.S4.S4", "HMMA.777.F32", "SUST.P"]
)
def test_what_is_not_known_is_counted_for_issue_and_named(opcode):
    found = demand({opcode: 3}, "sm_90")
    assert (found.cycles, found.unknown) == ({"issue": 3 / 4}, {opcode: 3})


def test_another_architecture_is_refused():
    with pytest.raises(ValueError, match="no rates of 'sm_75' are known; there are sm_80, sm_90"):
        demand({"EXIT": 1}, "sm_75")


@pytest.mark.parametrize(
    ("opcode", "found"),
    [
        ("LDG.E", 4),
        ("LDG.E.U8.CONSTANT", 1),
        ("LDG.E.U16.CONSTANT", 2),
        ("LDG.E.64", 8),
        ("LDGSTS.E.BYPASS.128", 16),
        ("LDGSTS.E.BYPASS.LTC128B.128", 16),
        ("LDSM.16.M88", 4),
        ("LDSM.16.M88.2", 8),
        ("STG.E.128", 16),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", 4),
    ],
)
def test_bytes_of_an_access(opcode, found):
    assert width(opcode) == found


def test_global_bytes_are_those_of_all_lanes():
    found = demand({"LDG.E.128": 2, "LDGSTS.E.64": 1, "LDS.128": 7, "STG.E.U16": 3}, "sm_80")
    assert (found.loaded, found.copied, found.stored) == (32 * 32, 32 * 8, 32 * 6)
    assert found.instructions == 13
    assert found.cycles["lsu"] == 13
    assert found.cycles["l1"] == 2 * 4 + 7 * 4 + 3 * 1


def test_opcodes_count_as_often_as_they_are_executed():
    code = sass("LDG.E R1,[R2]", "FFMA R1", "LDG.E R1,[R3]", "NOP", "EXIT", "MOV R1,R2")
    found = opcode_counts(code, [1, 10, 10, 1, 1, 0])
    assert found == {"LDG.E": 11, "FFMA": 10, "EXIT": 1}

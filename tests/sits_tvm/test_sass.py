"""Machine code as a list of instructions: the main loop, and what counts."""

from sass_text import sass

from sits_tvm.device_code.sass import count
from sits_tvm.device_code.sass_loops import main_loop


def test_main_loop_is_the_innermost_that_multiplies():
    """The wait at 2 does not make the loop around it an outer one; the outer loop is no match."""
    code = sass(
        "MOV R1,RZ",  # 0x00
        "LDG.E.128 R4,[R2]",  # 0x10: main loop
        "SYNCS.TRY R3",  # 0x20: wait
        "BRA P0,0x20",  # 0x30
        "HMMA.16816.F32 R8,R4,R6,R8",  # 0x40
        "BRA P0,0x10",  # 0x50
        "FFMA R1,R1,R2,R3",  # 0x60
        "BRA 0x0",  # 0x70: outer loop
        "EXIT",  # 0x80
        "BRA 0x90",  # 0x90: the trap after EXIT
    )
    found = count(main_loop(code))
    assert (found["total"], found["HMMA"], found["FFMA"], found["LDG.128"]) == (5, 1, 0, 1)


def test_a_loop_without_arithmetic_is_no_main_loop():
    assert main_loop(sass("LDG.E R4,[R2]", "BRA P0,0x0", "EXIT")) == []


def test_padding_is_not_counted():
    assert count(sass("EXIT", "NOP", "NOP"))["total"] == 1

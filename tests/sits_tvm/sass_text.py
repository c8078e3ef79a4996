"""Machine code written down as text."""

from sits_tvm.device_code.sass import Instruction


def sass(*lines):
    """Instructions from lines like "@P0 BRA 0x10"; an instruction is 0x10 long."""
    split = [line.split(" ") for line in lines]
    return [
        Instruction(words[1], "".join(words[2:]), words[0])
        if words[0].startswith("@")
        else Instruction(words[0], "".join(words[1:]))
        for words in split
    ]

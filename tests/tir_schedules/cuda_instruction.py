"""A CUDA kernel of one PTX instruction, for tests of what it does."""

import numpy as np
from cuda_text import GlobalArray

_TYPES = {"r": ("unsigned int", "uint32"), "f": ("float", "float32"), "s": ("int", "int32")}


class Instruction:
    """``run(*inputs)`` runs an instruction in as many threads as the inputs have rows.

    `outputs` and `inputs` give a letter for each register: "ff" and "rrr", of `_TYPES`.
    """

    def __init__(self, name, template, outputs, *inputs):
        self.name, self.template, self.outputs, self.inputs = name, template, outputs, inputs

    def text(self):
        kinds = [self.outputs, *self.inputs]
        parameters = [f"{_TYPES[kind[0]][0]}* p{i}" for i, kind in enumerate(kinds)]
        places = [
            f"p{i}[t * {len(kind)} + {j}]" for i, kind in enumerate(kinds) for j in range(len(kind))
        ]
        letters = "".join(kinds)
        declared, operands = [], []
        for j, (letter, place) in enumerate(zip(letters, places, strict=True)):
            start = "" if j < len(self.outputs) else f" = {place}"
            declared.append(f"{_TYPES[letter][0]} r{j}{start};")
            operands.append(f'"{"=" * (j < len(self.outputs))}{letter.replace("s", "r")}"(r{j})')
        stores = [f"{places[j]} = r{j};" for j in range(len(self.outputs))]
        count = len(self.outputs)
        sections = f"{', '.join(operands[:count])} : {', '.join(operands[count:])}"
        return (
            f'extern "C" __global__ void {self.name}({", ".join(parameters)}) {{\n'
            f"  int t = blockIdx.x * 32 + threadIdx.x;\n  {' '.join(declared)}\n"
            f'  asm volatile("{self.template}" : {sections});\n  {" ".join(stores)}\n}}\n'
        )

    def run(self, library, *inputs):
        threads, kinds = len(inputs[0]), [self.outputs, *self.inputs]
        arrays = [GlobalArray("out", threads * 4 * len(self.outputs))]
        for kind, values in zip(self.inputs, inputs, strict=True):
            words = np.ascontiguousarray(values).view(_TYPES[kind[0]][1])
            arrays.append(GlobalArray("in", words.nbytes, words.reshape(threads, len(kind))))
        extents = {"blockIdx.x": threads // 32, "threadIdx.x": 32}
        library.launch(self.name, arrays, extents)
        return arrays[0].bytes.view(_TYPES[kinds[0][0]][1]).reshape(threads, -1).copy()

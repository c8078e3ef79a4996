"""A CUDA kernel of one PTX instruction, for tests of what it does."""

from cuda_text import GlobalArray

_TYPES = {"r": ("unsigned int", "uint32"), "f": ("float", "float32")}


class Instruction:
    """``run(*inputs)`` runs an instruction in as many threads as the inputs have rows.

    `outputs` and `inputs` give a letter for each register: "ff" and "rrr", of `_TYPES`.
    """

    def __init__(self, name, template, outputs, *inputs):
        self.name, self.template, self.outputs, self.inputs = name, template, outputs, inputs

    def text(self):
        """A register of a thread is its word of an argument: `p1[t * 3 + 2]`."""
        words, kinds = [], [self.outputs, *self.inputs]
        for i, kind in enumerate(kinds):
            words += [f"p{i}[t * {len(kind)} + {j}]" for j in range(len(kind))]
        registers = [f'"{letter}"(r{i})' for i, letter in enumerate("".join(kinds))]
        count = len(self.outputs)
        outputs = ", ".join(register.replace('"', '"=', 1) for register in registers[:count])
        declared = [
            f"{_TYPES[letter][0]} r{i}{f' = {words[i]}' if i >= count else ''};"
            for i, letter in enumerate("".join(kinds))
        ]
        stores = [f"{words[i]} = r{i};" for i in range(count)]
        parameters = ", ".join(f"{_TYPES[kind[0]][0]}* p{i}" for i, kind in enumerate(kinds))
        return f"""
extern "C" __global__ void {self.name}({parameters}) {{
  int t = blockIdx.x * 32 + threadIdx.x;
  {" ".join(declared)}
  asm volatile("{self.template}" : {outputs} : {", ".join(registers[count:])});
  {" ".join(stores)}
}}
"""

    def run(self, library, *inputs):
        threads, extents = len(inputs[0]), {"blockIdx.x": len(inputs[0]) // 32, "threadIdx.x": 32}
        arrays = [GlobalArray("out", threads * 4 * len(self.outputs))]
        arrays += [GlobalArray("in", values.nbytes, values) for values in inputs]
        library.launch(self.name, arrays, extents)
        return arrays[0].bytes.view(_TYPES[self.outputs[0]][1]).reshape(threads, -1).copy()

"""The text that TVM emits for an instruction does what the instruction by itself does."""

import numpy as np
from attention_cuda_runs import TARGET
from cuda_instruction import Instruction
from cuda_text import CudaText, Kernels
from tvm import tirx
from tvm.script import tirx as S
from tvm.tirx.script import builder as T

from tir_schedules.cuda_ptx import allocate_shared, local
from tir_schedules.emit import with_emitted_body

WORDS = 10  # that each lane has as operands
_FACTORS = "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}"
_MMA = "mma.sync.aligned.m16n8"
# Mnemonic: its operands, how many results and words from the first on, and a number behind them
INSTRUCTIONS = {
    f"{_MMA}k32.row.col.s32.s8.s8.s32": (_FACTORS, 4, 10, None),
    f"{_MMA}k32.row.col.s32.u8.s8.s32": (_FACTORS, 4, 10, None),
    f"{_MMA}k64.row.col.s32.s4.s4.s32": (_FACTORS, 4, 10, None),
    "lop3.b32": ("%0, %1, %2, %3", 1, 3, 0xCA),
    "prmt.b32": ("%0, %1, %2, %3", 1, 3, None),
    **{
        f"{operation}.{kind}x2": ("%0, %1, %2", 1, 2, None)
        for operation in ("add", "sub", "mul")
        for kind in ("f16", "bf16")
    },
    "fma.rn.f16x2": ("%0, %1, %2, %3", 1, 3, None),
    "fma.rn.bf16x2": ("%0, %1, %2, %3", 1, 3, None),
}
RESULTS = sum(count for _, count, *_ in INSTRUCTIONS.values())


@S.prim_func(s_tir=True)
def _signature(a: S.handle, b: S.handle):
    A = S.match_buffer(a, (32, WORDS), "uint32")
    B = S.match_buffer(b, (32, RESULTS + 8), "uint32")
    B[0, 0] = A[0, 0]


def _emit():
    given, out = _signature.params
    with T.launch_thread("blockIdx.x", 1), T.launch_thread("threadIdx.x", 32) as lane:
        words, results, first = local(WORDS, "uint32"), local(RESULTS + 8, "uint32"), 0
        with T.unroll(WORDS) as i:
            T.buffer_store(words, given[lane, i], [i])
        for mnemonic, (_, count, operands, number) in INSTRUCTIONS.items():
            destinations = [results[first + i] for i in range(count)]
            numbers = [] if number is None else [number]
            sources = [words[i] for i in range(operands)]
            T.evaluate(T.ptx[mnemonic](*destinations, *sources, *numbers))
            first += count
        _emit_moves(given, lane, [results[first + i] for i in range(8)])
        with T.unroll(RESULTS + 8) as i:
            T.buffer_store(out, results[i], [lane, i])


def _emit_moves(given, lane, results):
    """The first four words through shared memory, and the matrices that they are."""
    shared = allocate_shared(512, "words")
    own = shared + T.Cast("uint32", lane * 16)
    T.evaluate(T.ptx["ld.global.nc.v2.u32"](*results[:2], T.address_of(given[lane, 0])))
    T.evaluate(T.ptx["ld.global.v2.u32"](*results[2:4], T.address_of(given[lane, 2])))
    T.evaluate(T.ptx["st.shared.v4.b32"](own, *results[:4]))
    T.evaluate(T.tvm_storage_sync("shared"))
    T.evaluate(T.ptx["ldmatrix.sync.aligned.m8n8.x2.shared.b16"](*results[4:6], own))
    T.evaluate(T.ptx["ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16"](results[6], own))
    T.evaluate(T.ptx["ld.shared.u32"](results[7], own + tirx.const(12, "uint32")))


def test_emitted_instructions_take_operands_in_their_order(rng):
    given = rng.integers(0, 2**32, (32, WORDS), "uint32")
    out = np.zeros((32, RESULTS + 8), "uint32")
    CudaText(with_emitted_body(_signature, _emit), TARGET)(given, out)
    ones = {
        mnemonic: Instruction(
            mnemonic.replace(".", "_"),
            f"{mnemonic} {operands}{'' if number is None else f', {number}'};",
            "r" * count,
            *(["rrrr", "rr", "rrrr"] if count == 4 else "r" * sources),
        )
        for mnemonic, (operands, count, sources, number) in INSTRUCTIONS.items()
    }
    library, first = Kernels("".join(one.text() for one in ones.values())), 0
    for mnemonic, one in ones.items():
        widths = np.cumsum([len(kind) for kind in one.inputs])
        inputs = np.split(given[:, : widths[-1]], widths[:-1], axis=1)
        found = out[:, first : first + len(one.outputs)]
        expected = one.run(library, *inputs)
        np.testing.assert_array_equal(found, expected, err_msg=mnemonic)
        first += len(one.outputs)
    moved, matrices = out[:, first : first + 4], given[:, :4].copy().view("uint16")
    np.testing.assert_array_equal(moved, given[:, :4])
    np.testing.assert_array_equal(out[:, -4:-2], given[:16, :4].reshape(2, 32).T)
    pairs = np.ascontiguousarray(matrices[:8].T).view("uint32")
    np.testing.assert_array_equal(out[:, -2], pairs.reshape(-1))
    np.testing.assert_array_equal(out[:, -1], given[:, 3])

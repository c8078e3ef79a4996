"""Modules of PyTorch that unpack 4-bit codes by themselves are built of these codes."""

from collections import Counter

import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm
from sits_tvm import from_torch

torch = pytest.importorskip("torch")

N, K, GROUP = 16, 128, 32
TABLE = torch.arange(16.0) - 8
OF_COLUMN = torch.arange(K) // GROUP
HALF = torch.full((N, K // 2), 0.5)
STEPS = torch.ones(N, K).tril(-1) + 1  # equal in each group of the first row only


def halves(q):
    """Low half first."""
    return torch.stack([q & 15, q >> 4], -1).reshape(N, K)


def groups(x):
    return x.reshape(N, K // GROUP, GROUP)


def shifts():
    return torch.arange(4, -1, -4, dtype=torch.uint8)


def written(q):
    out = torch.zeros(N, K, dtype=torch.uint8)
    out[:, ::2], out[:, 1::2] = q & 15, q >> 4
    return out


def wide(x):
    return x.repeat_interleave(GROUP, 1)


# (x, bytes, scale, zero points) -> x @ W.T
UNPACK = {
    "minus eight": lambda x, q, s, z: x @ (halves(q).float() - 8).T,
    "high half first": lambda x, q, s, z: (
        x @ (torch.stack([q // 16, q % 16], -1).reshape(N, K).int() - 8).float().T
    ),
    "halves of rows": lambda x, q, s, z: (
        x @ ((torch.cat([q & 15, q >> 4], 1).float() - 8) * s[:, :1]).T
    ),
    "groups": lambda x, q, s, z: x @ ((groups(halves(q)) - 8.0) * s[:, :, None]).reshape(N, K).T,
    "zero points": lambda x, q, s, z: (
        x @ ((groups(halves(q)) - z[:, :, None].float()) * s[:, :, None]).reshape(N, K).T
    ),
    "integer zero points": lambda x, q, s, z: (
        x @ ((halves(q).char() - wide(z).char()).float() * wide(s)).T
    ),
    "sign by a comparison": lambda x, q, s, z: (
        x @ (torch.where(halves(q) > 7, halves(q).int() - 16, halves(q).int()).float() * wide(s)).T
    ),
    "a table, divided": lambda x, q, s, z: x @ (TABLE[halves(q).long()] / 16).T,
    "shifts by a tensor, flipped": lambda x, q, s, z: (
        x
        @ ((torch.bitwise_right_shift(q[:, :, None], shifts()) & 15).flip(-1).reshape(N, K) - 8.0).T
    ),
    "written into zeros": lambda x, q, s, z: x @ ((written(q).float() - 8) * wide(s)).T,
    "groups by index": lambda x, q, s, z: (
        x @ ((halves(q).float() - z[:, OF_COLUMN].float()) * s[:, OF_COLUMN]).T
    ),
    "joined": lambda x, q, s, z: (
        x @ torch.cat([((q & 15).float() - 8) * s[:, :1].tile(1, K // 2), (q >> 4) - 8.0], 1).T
    ),
    "k by n": lambda x, q, s, z: x @ ((halves(q).T.float() - 8) * s.T.repeat_interleave(GROUP, 0)),
}


class Unpacks(torch.nn.Module):
    """All of them, on buffers of its own; `large` makes the bytes a parameter."""

    def __init__(self, functions, large=False):
        super().__init__()
        self.functions = functions
        generator = torch.Generator().manual_seed(0)
        q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
        if large:
            q = torch.cat([q, torch.zeros(1 << 11, K // 2, dtype=torch.uint8)])
        self.register_buffer("qweight", q)
        self.register_buffer("scale", torch.rand(N, K // GROUP, generator=generator) - 0.5)
        z = torch.randint(0, 16, (N, K // GROUP), dtype=torch.uint8, generator=generator)
        self.register_buffer("zero", z)

    def forward(self, x):
        q = self.qweight if len(self.qweight) == N else self.qweight[:N]
        return tuple(f(x, q, self.scale, self.zero) for f in self.functions)


def imported(module):
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    mod, params = from_torch(module, (x,))
    ex = sits_tvm.build(mod, "llvm", params=params)
    vm = relax.VirtualMachine(ex, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(x.numpy()), *ex.param_list)
    got = [got] if isinstance(got, tvm.runtime.Tensor) else got
    for y, want in zip(got, module(x), strict=True):
        atol = 1e-5 * want.abs().max().item()
        np.testing.assert_allclose(y.numpy(), want.numpy(), rtol=0, atol=atol)
    return ex, [note for note in ex.report.diagnostics if note.code == "codes-not-recognised"]


def test_every_way_of_unpacking_is_built_of_codes():
    """Those of one weight are packed once."""
    ex, notes = imported(Unpacks(UNPACK.values()))
    assert notes == []
    specs = Counter(row.spec.split(",")[0] for row in ex.report.quantized)
    assert specs == {
        "int4 per channel symmetric": 4,
        "int4 g32 symmetric": 2,
        "int4 g32 asymmetric": 1,
        "int4 g64 symmetric": 1,
    }


@pytest.mark.slow
def test_a_large_buffer_stays_a_parameter():
    """Of which nothing is left but the codes."""
    ex, notes = imported(Unpacks([UNPACK["groups"], UNPACK["minus eight"]], large=True))
    assert notes == []
    names = ["qweight.unpacked.codes", "qweight.unpacked.scale"]
    assert list(ex.params)[:2] == names


def test_near_misses_stay_in_float_and_say_why():
    """With torch's numbers: bytes that wrap around are not unwrapped."""
    misses = {
        "more than 4 bits": lambda x, q, s, z: x @ torch.cat([q >> 1, q & 31], 1).float().T,
        "a zero point is no code": lambda x, q, s, z: x @ (halves(q).float() - 7.5).T,
        "follows the multiplication": lambda x, q, s, z: x @ (halves(q).float() * s[:, :1] - 8).T,
        "groups of 32": lambda x, q, s, z: x @ (halves(q).float() * (halves(q)[:1].float() + 1)).T,
        "more than 4": lambda x, q, s, z: x @ (halves(q) - z[:, :1]).float().T,
        "of groups of 32": lambda x, q, s, z: x @ (halves(q).float() * STEPS).T,
        "0…22, more than 4 bits": lambda x, q, s, z: x @ (halves(q).float() * 1.5).int().float().T,
        "no powers of two": lambda x, q, s, z: x @ (halves(q).float() / 3).T,
        "codes and floats": lambda x, q, s, z: x @ torch.cat([(q & 15).float(), HALF], 1).T,
    }
    ex, notes = imported(Unpacks(misses.values()))
    assert ex.report.quantized == []
    for note, wanted in zip(notes, misses, strict=True):
        assert wanted in note.message

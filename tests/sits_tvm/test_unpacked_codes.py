"""from_torch: modules that unpack 4-bit codes by themselves are built of these codes."""

import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm
from sits_tvm import from_torch
from sits_tvm.diagnostics import collect

torch = pytest.importorskip("torch")

N, K, GROUP = 16, 128, 32
STEPS = torch.ones(N, K).tril(-1) + 1  # equal in each group of the first row only


def halves(q):
    """Low half first."""
    return torch.stack([q & 15, q >> 4], -1).reshape(N, K)


def groups(x):
    return x.reshape(N, K // GROUP, GROUP)


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
    with collect() as notes:
        mod, params = from_torch(module, (x,))
    ex = sits_tvm.build(mod, "llvm", params=params)
    vm = relax.VirtualMachine(ex, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(x.numpy()), *ex.param_list)
    got = [got] if isinstance(got, tvm.runtime.Tensor) else got
    for y, want in zip(got, module(x), strict=True):
        atol = 1e-5 * want.abs().max().item()
        np.testing.assert_allclose(y.numpy(), want.numpy(), rtol=0, atol=atol)
    return mod, ex, notes


def test_every_way_of_unpacking_is_built_of_codes():
    """The last two of which are weights that earlier ones have: packed once."""
    mod, ex, notes = imported(Unpacks(UNPACK.values()))
    assert notes == []
    assert mod["main"].script().count("sits.dequantize") == len(UNPACK)
    specs = [row.spec.split(",")[0] for row in ex.report.quantized]
    channel, groups = (f"int4 {kind} " for kind in ("per channel", "g32"))
    wanted = [channel + "symmetric"] * 3 + [groups + "symmetric", groups + "asymmetric"]
    assert specs == wanted


@pytest.mark.slow
def test_a_large_buffer_stays_a_parameter():
    """Of which nothing is left but the codes."""
    _, ex, notes = imported(Unpacks([UNPACK["groups"], UNPACK["minus eight"]], large=True))
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
        "scales of their own": lambda x, q, s, z: (
            x @ torch.cat([(q & 15).float() * s[:, :1], (q >> 4).float()], 1).T
        ),
    }
    _, ex, notes = imported(Unpacks(misses.values()))
    assert ex.report.quantized == []
    assert {note.code for note in notes} == {"codes-not-recognised"}
    for note, wanted in zip(notes, misses, strict=True):
        assert wanted in note.message

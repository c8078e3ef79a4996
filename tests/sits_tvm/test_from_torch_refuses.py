"""from_torch: one error for all faults, and what to write instead."""

from pathlib import Path

import pytest
from torch_runs import Calls, Dim
from tvm import relax

import sits_tvm
from sits_tvm import SitsError
from sits_tvm.frontends.torch import convert_exported_program, from_torch

torch = pytest.importorskip("torch")


class Unsupported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        spectrum = torch.fft.fft(x).abs()
        bessel = torch.special.bessel_j0(x)
        noise = torch.randn(3)
        dropped = torch.nn.functional.dropout(x, 0.5, training=True)
        return spectrum + bessel, noise, dropped, torch.special.bessel_j0(bessel)


def test_one_error_lists_everything_with_its_line():
    with pytest.raises(SitsError) as caught:
        from_torch(Unsupported(), (torch.randn(4, 4),))
    found = [(d.code, d.message.split(":")[0]) for d in caught.value.diagnostics]
    assert sorted(found) == [
        ("buffer-mutation", "the model writes to `count`; a Relax function has no state"),
        ("op-not-converted", "native_dropout.default"),
        ("op-not-converted", "randn.default"),
        ("op-not-supported", "_fft_r2c.default"),
        ("op-not-supported", "special_bessel_j0.default"),
    ]
    text = str(caught.value)
    assert Path(__file__).name in text
    for line in ("torch.fft.fft(x).abs()", "bessel = torch.special", "torch.special.bessel_j0(b"):
        assert line in text


def test_the_converter_that_is_advised_converts():
    program = torch.export.export(Calls(torch.special.bessel_j0), (torch.randn(4),))
    with pytest.raises(SitsError, match="op-not-supported") as caught:
        from_torch(program)
    (found,) = caught.value.diagnostics
    call = found.help.split("converter: ")[1].replace("torch.export.export(…)", "program")
    given = {"converter": lambda node, imp: imp.env[node.args[0]]}
    mod, _ = eval(call, {"sits_tvm": sits_tvm, "program": program, **given})
    assert len(mod["main"].params) == 1


def test_refuses_names_that_torch_cannot_write():
    heads = torch.nn.ModuleDict({"class": torch.nn.Linear(4, 4), "box": torch.nn.Linear(4, 4)})
    model = Calls(lambda x: heads["class"](x) + heads["box"](x))
    model.heads = heads
    with pytest.raises(SitsError, match="attribute-name") as caught:
        from_torch(model, (torch.randn(1, 4),))
    found = [d.message.split(":")[0] for d in caught.value.diagnostics]
    assert found == ["`heads.class.weight`", "`heads.class.bias`"]


def test_refuses_a_keyword_that_nobody_reads():
    program = torch.export.export(
        Calls(lambda x: torch.nn.functional.gelu(x, approximate="tanh")), (torch.randn(4),)
    )
    ignores = {"gelu.default": lambda node, imp: imp.env[node.args[0]]}
    with pytest.raises(SitsError, match=r"gelu.default: the importer ignores approximate='tanh'"):
        convert_exported_program(program, ignores)


def test_refuses_another_type_than_torch():
    program = torch.export.export(Calls(lambda x: torch.tanh(x)), (torch.randn(4),))
    wrong = {
        "tanh.default": lambda node, imp: imp.block_builder.emit(
            relax.op.astype(imp.env[node.args[0]], "float16")
        )
    }
    with pytest.raises(SitsError, match=r"op-type.*float16.*torch says.*float32"):
        convert_exported_program(program, wrong)


def test_refuses_a_dimension_that_cannot_be_solved():
    shapes = (({1: 2 * Dim("s", min=2, max=9)},),)
    with pytest.raises(SitsError, match="dimension-not-solvable"):
        from_torch(Calls(lambda x: x[:, ::2]), (torch.randn(4, 8),), dynamic_shapes=shapes)


def test_refuses_a_scalar_input_by_name():
    class Scaled(torch.nn.Module):
        def forward(self, x, factor):
            return x * factor

    with pytest.raises(SitsError, match="input `factor`"):
        from_torch(Scaled(), (torch.ones(2), 3), dynamic_shapes=(None, Dim.DYNAMIC))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "expected a torch.nn.Module or ExportedProgram, got int"),
        ((torch.nn.Linear(2, 2),), "needs example inputs"),
        ((torch.nn.Linear(2, 2), (torch.ones(3),)), "torch-export-failed"),
    ],
)
def test_says_what_to_write(arguments, message):
    with pytest.raises(SitsError, match=message):
        from_torch(*arguments)

"""Every attention block of models of transformers is recognised, with the same numbers.

`pytest -s` prints one line per block: what the op says, and what was proved.
"""

import numpy as np
import pytest
import torch
import tvm
from attention_models import MODELS, Model
from tvm import relax

import sits_tvm
from relax_passes.canonicalize_attention import CanonicalizeAttention
from sits_tvm.report import Report

pytest.importorskip("transformers")
QUICK = ("Gemma 2, softcap", "GPT-2")


def cases():
    for model in MODELS:
        for implementation in model.implementations:
            for is_dynamic in (False, True) if model.dynamic else (False,):
                is_quick = model.name in QUICK and implementation == "eager" and not is_dynamic
                marks = () if is_quick else (pytest.mark.slow,)
                name = f"{model.name}-{implementation}{'-dynamic' * is_dynamic}"
                yield pytest.param(model, implementation, is_dynamic, id=name, marks=marks)


@pytest.mark.parametrize(("model", "implementation", "is_dynamic"), cases())
def test_every_block_is_recognised(model: Model, implementation: str, is_dynamic: bool):
    inputs, module = model.inputs(), model.build(implementation)
    shapes = _dynamic(model) if is_dynamic else None
    mod, params = sits_tvm.from_torch(module, tuple(inputs.values()), dynamic_shapes=shapes)
    report = Report()
    after = CanonicalizeAttention(report)(mod)
    for row in report.attention:
        print(row.binding, row.recognised, row.reason, row.attrs)
    assert [row.recognised for row in report.attention] == [True] * model.blocks
    vm = relax.VirtualMachine(executable := sits_tvm.build(after, "llvm", params=params), tvm.cpu())
    arrays = [x.numpy() for x in inputs.values()]
    found = vm["main"](*arrays, *executable.param_list).numpy()
    with torch.no_grad():
        want = module(*inputs.values()).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def _dynamic(model: Model) -> tuple[dict]:
    length = torch.export.Dim("s", min=2, max=48)
    axes = model.dynamic or {}
    return (tuple({axis: length for axis in axes.get(name, {})} for name in model.inputs()),)

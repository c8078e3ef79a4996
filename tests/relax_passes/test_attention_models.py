"""Every attention block of models of transformers is recognised, with the same numbers.

`pytest -s` prints one line per block: what the op says, and what was proved.
"""

import numpy as np
import pytest
import torch
import tvm
from attention_models import LENGTH, MODELS, OTHER_LENGTH, Model
from tvm import relax

import sits_tvm

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
    """And with all passes on, the numbers are torch's; at two lengths where it is symbolic."""
    module, shapes = model.build(implementation), _dynamic(model) if is_dynamic else None
    inputs = tuple(model.inputs(LENGTH).values())
    mod, params = sits_tvm.from_torch(module, inputs, dynamic_shapes=shapes)
    executable = sits_tvm.build(mod, "llvm", params=params)
    for row in (rows := executable.report.attention):
        print(row.binding, row.recognised, row.reason, row.attrs)
    assert [row.recognised for row in rows] == [True] * model.blocks
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    for length in (LENGTH, OTHER_LENGTH) if is_dynamic else (LENGTH,):
        inputs = model.inputs(length).values()
        found = main(*[x.numpy() for x in inputs], *executable.param_list).numpy()
        with torch.no_grad():
            want = module(*inputs).numpy()
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def _dynamic(model: Model) -> tuple[tuple[dict[int, torch.export.Dim], ...]]:
    def dims(axes: dict[int, str]) -> dict[int, torch.export.Dim]:
        return {axis: torch.export.Dim(name, min=2, max=48) for axis, name in axes.items()}

    return (tuple(dims(model.dynamic.get(name, {})) for name in model.inputs(LENGTH)),)

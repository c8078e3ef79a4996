"""Documentation that runs: the IR in every pass's docstring, and README's code and table."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import tvm
from small_modules import Mlp, mlp_params, one_function
from tvm import relax
from tvm.ir import assert_structural_equal

import relax_passes
import sits_tvm
from relax_passes import *  # noqa: F403
from sits_tvm import Config, QuantSpec
from tir_schedules.records.database import FORMAT

ROOT = Path(__file__).parent.parent
PACKAGES = ("sits_tvm", "relax_passes", "tir_schedules")
OPTIONS = {"QuantizeMatmulWeights": (Config(quant=QuantSpec(group_size=32)),)}


def pass_names() -> list[str]:
    return [name for name in relax_passes.__all__ if inspect.isclass(getattr(relax_passes, name))]


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def module_in(docstring: str, heading: str) -> tvm.IRModule:
    """The TVMScript under a line such as ``Before::``."""
    found = re.search(rf"^{heading}[^\n]*::\n\n((?:    [^\n]*\n|\n)+)", docstring, re.MULTILINE)
    assert found, f"no {heading}:: block"
    return tvm.script.from_source(textwrap.dedent(found[1]))


@pytest.mark.parametrize("name", pass_names())
def test_docstring_shows_what_the_pass_does(name: str) -> None:
    made = getattr(relax_passes, name)
    docstring = inspect.cleandoc(made.__doc__) + "\n"
    before, after = module_in(docstring, "Before"), module_in(docstring, "After")
    assert_structural_equal(made(*OPTIONS.get(name, ()))(before), after)


@pytest.mark.parametrize("name", pass_names())
def test_every_pass_has_file_test_and_readme_row(name: str) -> None:
    assert (ROOT / "relax_passes" / f"{snake(name)}.py").exists()
    assert (ROOT / "tests" / "relax_passes" / f"test_{snake(name)}.py").exists()
    assert f"| `{name}` |" in (ROOT / "README.md").read_text()


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_code_runs(tmp_path: Path) -> None:
    """All Python blocks of README.md in order, as one program; the second shows the pass."""
    blocks = readme_blocks()
    assert len(blocks) == 6
    check = (
        "from tvm.ir import assert_structural_equal\n"
        "import relax_passes, sits_tvm\n"
        "config = sits_tvm.Config(quant=sits_tvm.QuantSpec(group_size=32))\n"
        "after = relax_passes.QuantizeMatmulWeights(config)(Linear)\n"
        "assert_structural_equal(after['main'], PackedLinear['main'])\n"
        "assert np.mean(losses[-20:]) < 0.7 * losses[0]\n"
    )
    script = tmp_path / "readme.py"
    start = "import torch\ntorch.manual_seed(0)  # of the weights and the batches"
    script.write_text("\n".join([blocks[0], start, *blocks[1:], check]))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("INT4 weights: 2") == 2
    assert done.stdout.count("int8 activations") == 2  # a row for each weight
    assert done.stdout.count("attention: 1 of 1 recognised") == 2  # "off" does not look


def first_calls(run: Callable[[], object]) -> list[str]:
    """Our functions and classes, and `relax.build`, in the order of their first calls."""
    names: dict[str, None] = {}

    def note(frame: FrameType, event: str, _arg: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event != "call":
            return
        if path.name == "vm_build.py":
            names.setdefault(f"relax.{name}", None)
        elif {ROOT / package for package in PACKAGES} & set(path.parents):
            made = type(frame.f_locals.get("self")).__name__
            names.setdefault(made if name == "__init__" else name, None)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(names)


def test_a_module_flows_through_build_as_readme_says() -> None:
    section = (ROOT / "README.md").read_text().split("## How a module flows")[1].split("\n## ")[0]
    steps = re.findall(r"^\d\. (.*)$", section, re.MULTILINE)
    named = [name for step in steps for name in re.findall(r"`([\w.]+)`", step)]
    types = [relax.TensorType(shape, "float16") for shape in ((4, 64), (64, 64))]
    mod = one_function(
        lambda bb, x, w: bb.emit(relax.op.matmul(x, relax.op.permute_dims(w))), *types, num_input=1
    )
    config = Config(quant=QuantSpec(group_size=32))
    params = {mod["main"].params[1].name: np.ones((64, 64), "float16")}
    called = first_calls(
        lambda: sits_tvm.build(mod, "cuda -arch=sm_90", params=params, config=config)
    )
    flow = dict.fromkeys(name for name in named if name in called)
    assert [name for name in called if name in flow] == list(flow)
    assert len(flow) == 15


def stored_output(tutorial: str) -> str:
    (path,) = (ROOT / "tutorials").glob(f"{tutorial}_*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", [])) for output in outputs)


def test_tutorials_show_the_passes_and_the_records_of_today() -> None:
    """Of what they stored when they were run last."""
    config = Config(quant=QuantSpec(group_size=32))
    params = mlp_params(np.random.default_rng(0))
    _, report = sits_tvm.lower(Mlp, "llvm -mcpu=native", params=params, config=config)
    shown = re.findall(r"^(?:changed it|left it as it was): +(.*)$", stored_output("01"), re.M)
    assert sorted(" ".join(shown).split()) == sorted(run.name for run in report.passes)
    assert set(re.findall(r'"format": (\d+)', stored_output("08"))) == {str(FORMAT)}

"""The bundle for machines with a GPU: its dry run, and its checks with kernels run on the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_text import GlobalArray, Kernels

from sits_tvm import parse_target
from sits_tvm.device_code import cuda_sources
from tests.benchmarks.gpu_bundle import write

sys.path.insert(0, str(Path(write.__file__).parent))  # run.py imports its neighbours, as there
import run

CASES = [
    (72, 200, None, "float16", 32, False),
    (36, 136, "int8", "bfloat16", 64, False),
    (64, 130, "int8", "float16", -1, True),
    (40, 72, None, "float32", 32, False),
]


class OnHost:
    """What `run.Case` does, by the emitted text."""

    def __init__(self, case, executable):
        (text,) = cuda_sources(executable)
        self.case, self.kernels = case, Kernels(text)

    def run(self, arguments, rows):
        written = {self.case["output"], "partial", "buffer"}
        arrays = {
            name: GlobalArray(name, tensor.nbytes, None if name in written else _bytes(tensor))
            for name, tensor in arguments.items()
        }
        for kernel in run.bucket_of(self.case, rows)["kernels"]:
            values = [
                arrays[text] if text in arrays else run.evaluate(text, rows)
                for text in kernel["arguments"]
            ]
            tags = [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "xyz"]
            sizes = run.extents(kernel["grid"], rows) + run.extents(kernel["block"], rows)
            extents = dict(zip(tags, sizes, strict=True))
            self.kernels.launch(kernel["name"], values, extents, kernel["dynamic_smem"])
        out = arrays[self.case["output"]]
        assert (out.counts == 1).all()
        _bytes(arguments[self.case["output"]])[:] = out.bytes


def _bytes(tensor):
    return tensor.view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize(
    "form",
    [CASES[1], *(pytest.param(x, marks=pytest.mark.slow) for x in (CASES[0], *CASES[2:]))],
    ids=str,
)
def test_its_checks_pass_on_the_host(monkeypatch, form):
    monkeypatch.setattr(run, "RAGGED", (1, 5, 17))
    case, executable, _ = write.built(parse_target("cuda -arch=sm_90a"), *form)
    case, manifest = json.loads(json.dumps(case)), {"int8_columns": write.int8_columns()}
    kernels, device = OnHost(case, executable), torch.device("cpu")
    assert run.check(manifest, case, kernels, device) <= 1
    case["unit"]["lane"] = sorted(case["unit"]["lane"], reverse=True)
    assert run.check(manifest, case, kernels, device) > 1


def estimates_of(case):
    return [seconds for seconds in case["estimates"].values() if seconds is not None]


def test_its_dry_run_passes_and_sees_a_changed_file(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "COMPARED", CASES[:1])
    monkeypatch.setattr(write, "CHANGES", ({"stages": 2},))
    write.write(tmp_path, "sm_90a", CASES[:1])
    dry = [sys.executable, str(tmp_path / "run.py"), "--dry"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [case["is_default"] for case in manifest["cases"]] == [True, False]
    assert all(1e-6 < seconds < 1e-4 for seconds in estimates_of(manifest["cases"][0]))
    assert "2 cases: files, unpacking and launches are right" in subprocess.check_output(
        dry, text=True
    )
    cubin, _ = tmp_path.glob("*.cubin")
    cubin.write_bytes(cubin.read_bytes() + b" ")
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(dry, check=True, capture_output=True)

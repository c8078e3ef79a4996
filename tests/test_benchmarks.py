"""Every benchmark runs to its end, with as little work as it allows, and writes its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
LEAST = {
    "bench_kernels": ["--rounds", "1"],
    "bench_int4": ["--rounds", "1", "--only", "W4A8", "M=2"],
    "bench_int4_variants": ["--rounds", "1"],
    "bench_int4_model": ["--rounds", "1", "--only", "W4A8"],
    "bench_attention": ["--rounds", "1"],
    "bench_attention_models": ["--rounds", "1"],
    "bench_fake_quantize": ["--rounds", "1"],
    "bench_qat": ["--seeds", "1", "--tasks", "digits"],
    "bench_gradient_fidelity": ["--steps", "3", "--models", "MLP"],
    "main_job": ["--tokens", "100"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAST)
def test_writes_its_figures(name: str, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "figures.json"
    command = [sys.executable, FOLDER / f"{name}.py", *LEAST[name], "--json", file]
    env = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE)
    found = json.loads(file.read_text())
    assert {"cpu", "threads", "apache-tvm"} <= found.pop("machine").keys()
    assert found

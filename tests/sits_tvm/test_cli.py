"""``python -m sits_tvm``: each subcommand, its exit code, its JSON, and what it refuses."""

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from small_modules import Mlp

import sits_tvm
from sits_tvm.__main__ import main


@pytest.fixture
def mlp_json(tmp_path):
    path = tmp_path / "mlp.json"
    path.write_text(tvm.ir.save_json(Mlp))
    return str(path)


@pytest.fixture
def mlp_pt2(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    program = torch.export.export(model.eval(), (torch.zeros(2, 64),))
    torch.export.save(program, tmp_path / "mlp.pt2")
    return str(tmp_path / "mlp.pt2")


def test_build_saves_what_load_reads(mlp_pt2, tmp_path, capsys):
    assert main(["build", mlp_pt2, "--int4", "-o", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "INT4 weights: 2" in out
    assert re.search(r"^\[ +\d+\.\d s\] pass QuantizeMatmulWeights$", err, re.MULTILINE)
    loaded = sits_tvm.load(tmp_path / "out")
    vm = tvm.relax.VirtualMachine(loaded, tvm.cpu())
    x = np.ones((2, 64), "float32")
    want = torch.export.load(mlp_pt2).module()(torch.from_numpy(x)).detach().numpy()
    got = vm["main"](x, *loaded.param_list).numpy()
    assert np.abs(got - want).max() < 0.2 * np.abs(want).max()


def test_build_prints_json(mlp_json, capsys):
    assert main(["build", mlp_json, "--int4", "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert [row["name"] for row in json.loads(out)["quantized"]] == ["up", "down"]
    assert err == ""


def test_config_file(mlp_json, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("quant:\n  group_size: 32\n  symmetric: false\nskip: ['down']\n")
    assert main(["build", mlp_json, "--config", str(config), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "nothing is saved without -o DIR" in err
    (row,) = json.loads(out)["quantized"]
    assert (row["name"], row["spec"]) == ("up", "int4 g32 asymmetric, float16 scales")


def test_lower_prints_or_saves_ir(mlp_json, tmp_path, capsys):
    assert main(["lower", mlp_json, "--int4", "--quiet"]) == 0
    assert "@T.prim_func" in capsys.readouterr().out
    assert main(["lower", mlp_json, "--int4", "--quiet", "-o", str(tmp_path / "out")]) == 0
    saved = tvm.ir.load_json((tmp_path / "out" / "module.json").read_text())
    assert "main" in [v.name_hint for v in saved.get_global_vars()]


def test_check_exits_by_severity(mlp_json, tmp_path, capsys):
    assert main(["check", mlp_json, "--int4", "--quiet"]) == 0
    assert "INT4 weights: 2" in capsys.readouterr().out
    (tmp_path / "config.yaml").write_text("quant: {}\nskip: ['*']\n")
    config = ["--config", str(tmp_path / "config.yaml")]
    assert main(["check", mlp_json, *config, "--quiet", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    assert [d["code"] for d in found] == ["skipped", "skipped", "nothing-to-quantize"]


def test_check_prints_the_tables_of_build(tmp_path, capsys):
    """Of attention, too; and the error, where there is one."""

    class Attend(torch.nn.Module):
        def forward(self, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    model = str(tmp_path / "attend.pt2")
    torch.export.save(torch.export.export(Attend(), (torch.zeros(1, 2, 5, 8),)), model)
    assert main(["check", model, "--quiet"]) == 0
    checked = capsys.readouterr().out
    assert main(["build", model, "--quiet"]) == 0
    tables = [text.partition("kernels:")[0] for text in (checked, capsys.readouterr().out)]
    assert tables[0] == tables[1]
    assert "attention: 1 of 1 recognised" in checked
    assert main(["check", model, "--int4", "--quiet"]) == 1
    assert "error[nothing-to-quantize]" in capsys.readouterr().out


def test_info_is_one_table(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("TVM", "LLVM", "nvcc", "nvdisasm", "driver", "torch"):
        assert word.lower() in out.lower()
    assert main(["info", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["TVM"]["found"] == tvm.__version__


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        (None, None, "model-not-found"),
        ("model.safetensors", "", "model-format"),
        ("model.json", "{]", "model-not-readable"),
        ("model.onnx", "no onnx", None),
        ("model.pt2", "no zip", "model-not-readable"),
        ("model.gguf", "GGUF", "gguf-damaged"),
    ],
)
def test_refuses_models_it_cannot_read(tmp_path, capsys, name, text, code):
    path = tmp_path / (name or "nowhere")
    if name:
        path.write_text(text)
    assert main(["check", str(path), "--quiet"]) == 1
    err = capsys.readouterr().err
    assert str(path) in err
    assert "['" not in err
    assert err.startswith(f"error[{code}]" if code else "error[")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("quant: {group_size: 48}", "48"),
        ("qaunt: {}", "qaunt"),
        ("- 1", "mapping"),
        ("a: [", "yaml"),
    ],
)
def test_refuses_bad_config_files(mlp_json, tmp_path, capsys, text, word):
    (tmp_path / "config.yaml").write_text(text)
    check = ["check", mlp_json, "--config", str(tmp_path / "config.yaml"), "--quiet"]
    for options in ([], ["--int4"]):
        assert main(check + options) == 1
        assert word in capsys.readouterr().err


def test_refuses_unwritable_output_before_the_work(mlp_json, capsys):
    assert main(["build", mlp_json, "-o", "/proc/out", "--quiet"]) == 1
    assert "output-not-writable" in capsys.readouterr().err


def test_lower_that_cannot_write_all_writes_nothing(mlp_json, tmp_path, capsys, monkeypatch):
    """The disk is full at the second file."""
    out, write = tmp_path / "out", Path.write_text

    def full(path, text):
        if path.name == "report.json":
            write(path, text[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text)

    for files in ([], ["module.json", "report.json"]):
        monkeypatch.setattr(Path, "write_text", full)
        assert main(["lower", mlp_json, "--int4", "-o", str(out), "--quiet"]) == 1
        assert "No space left" in capsys.readouterr().err
        assert sorted(path.name for path in out.iterdir()) == files
        monkeypatch.undo()
        assert main(["lower", mlp_json, "-o", str(out), "--quiet"]) == 0
    assert json.loads((out / "report.json").read_text())["quantized"] == []


def test_refuses_unwritable_output_of_lower(mlp_json, capsys):
    assert main(["lower", mlp_json, "-o", "/proc/out", "--quiet"]) == 1
    assert "output-not-writable" in capsys.readouterr().err


def test_usage_error_exits_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "sits_tvm", "bulid"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "build" in done.stderr


def test_refuses_a_config_file_that_is_no_text(mlp_json, tmp_path, capsys):
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    assert main(["check", mlp_json, "--config", str(tmp_path / "config.yaml"), "--quiet"]) == 1
    assert "config-not-readable" in capsys.readouterr().err


def test_output_that_is_closed_is_no_traceback(mlp_json):
    """As of ``| head -1``."""
    command = [sys.executable, "-m", "sits_tvm", "lower", mlp_json, "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read().decode() == ""
    assert process.returncode == 1

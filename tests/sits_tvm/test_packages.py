"""Without an optional package, each front end says which extra brings it."""

import sys

import pytest

import sits_tvm
from sits_tvm import SitsError
from sits_tvm.__main__ import main
from sits_tvm.attention_redundancy.result import AttentionRedundancy


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("torch", "hf", lambda path: sits_tvm.from_torch(None)),
        ("transformers", "hf", sits_tvm.from_pretrained),
        ("gguf", "hf", sits_tvm.from_pretrained),
        ("onnx", "onnx", sits_tvm.from_onnx),
    ],
)
def test_names_the_extra(monkeypatch, tmp_path, package, extra, call):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SitsError) as raised:
        call(path)
    (found,) = raised.value.diagnostics
    assert (found.code, found.help) == ("package-missing", f"pip install 'sits_tvm[{extra}]'")
    assert package in found.message


def test_command_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "model.pt2").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["check", str(tmp_path / "model.pt2"), "--quiet"]) == 1
    assert "pip install 'sits_tvm[hf]'" in capsys.readouterr().err


def test_plot_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SitsError, match=r"plot needs matplotlib[^$]*sits_tvm\[tutorials\]"):
        AttentionRedundancy([]).plot()

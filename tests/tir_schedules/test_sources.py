"""The digest that trials of a kernel carry."""

import re
import shutil

import pytest

from tir_schedules import sources

ROOT, RULE = sources._ROOT, "tir_schedules.matmul_cuda.rule"
READ = ["matmul_cuda/rule", "matmul_cuda/half", "matmul_cuda/tile", "cuda_ptx", "emit",
        "matmul/int4_matmul", "int4_format/packed_layout"]  # fmt: skip


def changes(name, folder, monkeypatch):
    """Whether the digest of the rule is another with a line more in a module."""
    before = sources.digest.__wrapped__(RULE)
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns("database", "__pycache__"))
    with (folder / "copy" / f"{name}.py").open("a") as file:
        file.write("# more\n")
    monkeypatch.setattr(sources, "_ROOT", folder / "copy")
    return sources.digest.__wrapped__(RULE) != before


@pytest.mark.parametrize("name", READ)
def test_changes_with_what_makes_the_kernel(name, tmp_path, monkeypatch):
    assert changes(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["matmul_cpu/gemv", "attention/cuda", "records/database"])
def test_stays_with_what_makes_others(name, tmp_path, monkeypatch):
    assert not changes(name, tmp_path, monkeypatch)


def test_every_import_is_found():
    """All have the one form that is looked for."""
    ours = re.compile(r"^\s*(?:from|import) +(?:\.|tir_schedules).*$", re.M)
    for path in ROOT.glob("**/*.py"):
        imports = ours.findall(path.read_text())
        assert len(sources._IMPORT.findall("\n".join(imports))) == len(imports), path

"""The import rules: what may import what, how fast, and what `import sits_tvm` must not need."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPTIONAL = ("torch", "transformers", "onnx", "gguf", "yaml", "cuda")
# What a module of the key may import; longest prefix wins.
LEAVES = {
    "sits_tvm._safetensors",
    "sits_tvm.config",
    "sits_tvm.diagnostics",
    "sits_tvm.report",
    "sits_tvm.target",
    "sits_tvm.int4_tensors",
    "sits_tvm.optional_packages",
    "sits_tvm.quick_parsing",
}
ABOVE_THE_LEAVES = {
    f"sits_tvm.{name}"
    for name in ("driver", "pipeline", "executable", "params", "device_code", "frontends")
}
ALLOWED = {
    "tir_schedules": {"tir_schedules", *LEAVES},
    "relax_passes": {"relax_passes", "tir_schedules", *LEAVES},
    "sits_tvm.frontends": {"sits_tvm.frontends", "relax_passes", *LEAVES},
    "sits_tvm": {"sits_tvm", "relax_passes", "tir_schedules"},
}


def sources() -> list[Path]:
    return [
        p
        for name in ("sits_tvm", "relax_passes", "tir_schedules")
        for p in (ROOT / name).rglob("*.py")
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute module, deferred into a function?) of every import statement."""
    found = []
    package = (
        module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    )

    def visit(node: ast.AST, deferred: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found.extend((f"{base}.{alias.name}", deferred) for alias in node.names)
        inner = deferred or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(path.read_text()), False)
    return found


def within(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_go_downwards(path: Path) -> None:
    name = module_name(path)
    rule = max((key for key in ALLOWED if within(name, {key})), key=len)
    if name in LEAVES:
        allowed = {"sits_tvm"}  # leaves may share private helpers, but nothing above them
        above = {"relax_passes", "tir_schedules", *ABOVE_THE_LEAVES}
    else:
        allowed, above = ALLOWED[rule], set()
    ours = [
        target
        for target, _ in imports(path)
        if within(target, {"sits_tvm", "relax_passes", "tir_schedules"})
    ]
    if path.name == "__init__.py":  # loading the public package first breaks the import cycle
        ours = [target for target in ours if target != "sits_tvm"]
    assert [t for t in ours if not within(t, allowed) or within(t, above)] == []


SCHEDULES = [
    "attention",
    "matmul_cpu",
    "activations",
    "matmul_cuda",
    "quantization",
    "matmul",
    "records",
    "int4_format",
    "cpu",
]
"""The packages of tir_schedules: each may import those after it, and the modules beside them."""


@pytest.mark.parametrize("path", (ROOT / "tir_schedules").glob("*/*.py"), ids=module_name)
def test_packages_of_schedules_import_downwards(path: Path) -> None:
    package = path.parent.name
    above = {f"tir_schedules.{name}" for name in SCHEDULES[: SCHEDULES.index(package)]}
    assert [target for target, _ in imports(path) if within(target, above)] == []


@pytest.mark.parametrize("path", (ROOT / "tir_schedules").glob("[a-z]*.py"), ids=module_name)
def test_modules_beside_packages_of_schedules_import_none(path: Path) -> None:
    """So that each package may import them."""
    packages = {f"tir_schedules.{name}" for name in SCHEDULES}
    assert [target for target, _ in imports(path) if within(target, packages)] == []


def passes() -> list[Path]:
    return sorted((ROOT / "relax_passes").glob("[a-z]*.py"))


@pytest.mark.parametrize("path", passes(), ids=lambda path: path.stem)
def test_passes_do_not_import_each_other(path: Path) -> None:
    others = {f"relax_passes.{other.stem}" for other in passes()} - {f"relax_passes.{path.stem}"}
    assert [target for target, _ in imports(path) if within(target, others)] == []


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_optional_packages_are_imported_late(path: Path) -> None:
    early = [
        target
        for target, deferred in imports(path)
        if not deferred and within(target, set(OPTIONAL))
    ]
    if early:  # fine in a module that only a front end's function loads
        private = module_name(path)
        loaders = [
            other
            for other in sources()
            for target, deferred in imports(other)
            if within(target, {private}) and not deferred
        ]
        assert private.startswith("sits_tvm.frontends._")
        assert all(module_name(other).startswith("sits_tvm.frontends._") for other in loaders)


BLOCKED = f"""
import sys, time
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ImportError(f"blocked {{name}}")
sys.meta_path.insert(0, Block())
import tvm
from tvm import relax
start = time.process_time()  # of this process: other load does not count
import sits_tvm
print(time.process_time() - start)
assert not set(sys.modules) & set({OPTIONAL!r})
sits_tvm.parse_target("cuda -arch=sm_90")
relax.get_pipeline("sits")
"""


def run_fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_no_optional_package_and_is_fast() -> None:
    """The least of three: processes that share a core slow each other's caches."""
    assert min(float(run_fresh(BLOCKED).split()[-1]) for _ in range(3)) < 1.0


@pytest.mark.parametrize(
    "first", ["relax_passes", "tir_schedules", "relax_passes.op", "sits_tvm.driver"]
)
def test_any_package_can_be_imported_first(first: str) -> None:
    run_fresh(f"import {first}, sits_tvm; sits_tvm.build")


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_of_the_own_package_are_relative(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]
    modules = [
        node.module or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    assert not [module for module in modules if module.partition(".")[0] == top]

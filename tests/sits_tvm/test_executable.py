"""Saved and loaded, an executable is the same; what is no executable is refused."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tvm
from small_modules import Mlp, mlp_params
from tvm import relax

import sits_tvm
from sits_tvm import Config, QuantSpec, SitsError

QUANT = Config(quant=QuantSpec(group_size=32, symmetric=False))


def build():
    params = mlp_params(np.random.default_rng(0))
    return sits_tvm.build(Mlp, "llvm -mcpu=native", params=params, config=QUANT)


@pytest.fixture(scope="module")
def built():
    return build()


def run(executable, x):
    vm = relax.VirtualMachine(executable, tvm.cpu())
    return vm["main"](x, *executable.param_list).numpy()


def code_of(function, *args):
    with pytest.raises(SitsError) as raised:
        function(*args)
    (found,) = raised.value.diagnostics
    return found.code


@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 170, 64)])
def test_every_call_gives_the_same_numbers(built, rng, shape):
    """Whatever thread ends first."""
    x = rng.standard_normal(shape).astype("float32")
    first = run(built, x)
    for _ in range(20):
        np.testing.assert_array_equal(run(built, x), first)


def test_round_trip_is_bit_for_bit(built, tmp_path, rng):
    x = rng.standard_normal((2, 5, 64)).astype("float32")
    loaded = sits_tvm.load(built.save(tmp_path / "model"))
    np.testing.assert_array_equal(run(loaded, x), run(built, x))
    assert loaded.report == built.report
    assert loaded.param_names == built.param_names


def test_loads_in_another_process(built, tmp_path):
    path = built.save(tmp_path / "model")
    code = (
        "import sys, sits_tvm, tvm, numpy as np\n"
        f"ex = sits_tvm.load({str(path)!r})\n"
        "vm = tvm.relax.VirtualMachine(ex, tvm.cpu())\n"
        "print(vm['main'](np.ones((1, 1, 64), 'float32'), *ex.param_list).numpy().sum())\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = run(built, np.ones((1, 1, 64), "float32")).sum()
    assert float(out.stdout.split()[-1]) == pytest.approx(expected, rel=1e-6)


def test_params_are_plain_safetensors(built, tmp_path):
    path = built.save(tmp_path / "model")
    stored = safetensors.numpy.load_file(path / "params.safetensors")
    assert list(stored) == list(built.params)
    for name, tensor in built.params.items():
        np.testing.assert_array_equal(stored[name], tensor.numpy())


def test_saves_over_an_older_one_and_leaves_no_drafts(built, tmp_path):
    built.save(tmp_path / "model")
    built.save(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o755


def test_leaves_other_folders_alone(built, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert code_of(built.save, tmp_path) == "output-not-empty"
    assert code_of(built.save, tmp_path / "thesis.txt") == "output-not-a-folder"
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "library.so").write_text("of another program")
    assert code_of(built.save, tmp_path / "other") == "output-not-empty"


def test_leaves_files_beside_an_older_one_alone(built, tmp_path):
    path = built.save(tmp_path / "model")
    (path / "notes.txt").write_text("years of work")
    assert code_of(built.save, path) == "output-not-empty"
    assert (path / "notes.txt").exists()


def test_saves_through_a_link_and_in_the_working_directory(built, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    built.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    monkeypatch.chdir(tmp_path / "real")
    built.save(".")
    assert sits_tvm.load(tmp_path / "real").report == built.report


def test_the_older_one_comes_back_if_it_cannot_be_replaced(built, tmp_path, monkeypatch):
    path, rename = built.save(tmp_path / "model"), Path.rename

    def fail(self, target):
        if Path(target) == path and not self.name.endswith(".old"):
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert code_of(built.save, path) == "output-not-writable"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert sits_tvm.load(path).report == built.report


def test_a_save_that_is_killed_leaves_the_older_one(built, tmp_path, monkeypatch):
    """Between the two renames; the next save tidies up."""
    path, rename = built.save(tmp_path / "model"), Path.rename

    def kill(self, target):
        if Path(target) == path:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        with pytest.raises(KeyboardInterrupt):
            built.save(path)
    assert not path.exists()
    assert sits_tvm.load(path).report == built.report
    built.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_save_that_is_killed_anywhere_leaves_an_executable(built, tmp_path):
    path, here = built.save(tmp_path / "model"), Path(__file__).parent
    code = "import test_executable as t; ex = t.build(); print(flush=True)"
    code += f"\nwhile True: ex.save({str(path)!r})"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, (here, here.parent)), *sys.path]),
    }
    for number in range(4):
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout.readline()
            time.sleep(0.1 + 0.4 * number)
            process.kill()
        assert sits_tvm.load(path).params.keys() == built.params.keys()


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler", ""])
def test_says_that_the_library_was_not_linked(compiler, built, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "")
    assert code_of(built.save, tmp_path / "model") == "library-not-linked"
    assert list(tmp_path.iterdir()) == []


def test_refuses_an_unwritable_place(built):
    assert code_of(built.save, "/proc/model") == "output-not-writable"


def test_a_failure_leaves_nothing_behind(built, tmp_path, monkeypatch):
    def fail(*_args):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr("sits_tvm.executable.write_safetensors", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        built.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_refuses_what_is_no_executable(tmp_path):
    assert code_of(sits_tvm.load, tmp_path) == "not-an-executable"
    assert code_of(sits_tvm.load, tmp_path / "nowhere") == "not-an-executable"


def edit(path, **changes):
    meta = json.loads((path / "executable.json").read_text())
    (path / "executable.json").write_text(json.dumps(meta | changes))


def test_refuses_another_format_version(built, tmp_path):
    path = built.save(tmp_path / "model")
    for version in (1, 2, 99):  # 1 had CUDA weights in another order, 2 no digest
        edit(path, format_version=version)
        with pytest.raises(SitsError, match=f"has format version {version}, this release reads 3"):
            sits_tvm.load(path)


def test_refuses_a_cpu_that_this_machine_is_not(built, tmp_path):
    path = built.save(tmp_path / "model")
    edit(path, target='{"kind":"llvm","mtriple":"aarch64-linux-gnu"}')
    assert code_of(sits_tvm.load, path) == "target-not-this-machine"


@pytest.mark.parametrize("part", ["report.json", "library.so", "params.safetensors"])
def test_refuses_a_folder_that_lacks_a_part(built, tmp_path, part):
    path = built.save(tmp_path / "cuda")  # the word in the path says nothing of a driver
    (path / part).unlink()
    expected = {"report.json": "executable-damaged", "library.so": "library-not-loadable"}
    assert code_of(sits_tvm.load, path) == expected.get(part, "params-damaged")


def test_refuses_a_table_of_contents_that_lacks_a_key(built, tmp_path):
    path = built.save(tmp_path / "model")
    (path / "executable.json").write_text('{"format_version": 3}')
    assert code_of(sits_tvm.load, path) == "executable-damaged"
    built.save(path)
    for names in ("w", ["w", 1], {"w": 1}, None):
        edit(path, param_names={"main": names})
        assert code_of(sits_tvm.load, path) == "executable-damaged"
    (path / "executable.json").write_text("[]")
    assert code_of(sits_tvm.load, path) == "format-version"


@pytest.mark.skipif(tvm.cuda().exist, reason="says what a machine without a driver says")
def test_cuda_code_needs_a_driver(tmp_path, rng):
    built = sits_tvm.build(Mlp, "cuda -arch=sm_90", params=mlp_params(rng))
    path = built.save(tmp_path / "model")
    assert (path / "device_0.cubin").exists() == bool(built.cubins)
    assert code_of(sits_tvm.load, path) == "cuda-not-available"


@pytest.mark.parametrize("size", [4, 100, 5000])
def test_refuses_damaged_params(built, tmp_path, size):
    path = built.save(tmp_path / "model")
    data = (path / "params.safetensors").read_bytes()
    (path / "params.safetensors").write_bytes(data[:size])
    assert code_of(sits_tvm.load, path) == "params-damaged"


@pytest.mark.parametrize("size", [100, 1000])
def test_refuses_a_library_that_is_cut_off(built, tmp_path, size):
    """The dynamic loader reads past its end, which ends the process."""
    path = built.save(tmp_path / "model")
    with (path / "library.so").open("r+b") as library:
        library.truncate(size)
    assert code_of(sits_tvm.load, path) == "library-not-loadable"


def rewrite_header(path, change):
    data = (path / "params.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(change(json.loads(data[8 : 8 + size]))).encode()
    (path / "params.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + data[8 + size :]
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda header: [*header], "params-damaged"),
        (lambda header: {"up.codes": 3}, "params-damaged"),
        (lambda header: {n: e for n, e in header.items() if n != "bias"}, "params-damaged"),
        (lambda header: {n.strip("b"): e for n, e in header.items()}, "executable-damaged"),
    ],
)
def test_refuses_params_that_are_not_those_of_the_build(built, tmp_path, change, code):
    path = built.save(tmp_path / "model")
    rewrite_header(path, change)
    assert code_of(sits_tvm.load, path) == code


def test_metadata_of_other_tools_is_no_tensor(built, tmp_path):
    path = built.save(tmp_path / "model")
    rewrite_header(path, lambda header: {"__metadata__": {"format": "pt"}, **header})
    assert [*sits_tvm.load(path).params] == [*built.params]


def test_params_for_names_functions(built):
    with pytest.raises(KeyError, match="no function 'decode'; there are main"):
        built.params_for("decode")


def test_bfloat16_params_survive(tmp_path):
    import ml_dtypes

    from sits_tvm._safetensors import read_safetensors, write_safetensors

    values = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    tensor = tvm.runtime.tensor(values)
    write_safetensors(tmp_path / "p", {"a": tensor, "empty": tvm.runtime.tensor(np.zeros((0, 3)))})
    back = read_safetensors(tmp_path / "p")
    np.testing.assert_array_equal(back["a"].numpy(), values)
    assert back["empty"].shape == (0, 3)

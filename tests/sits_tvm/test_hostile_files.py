"""Files that are damaged, or made to harm: an error that says so, and no crash, hang or flood."""

import json
import pathlib
import pickle
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
import wrong_inputs
from hostile_files import json_mutants, mutants, outcomes
from random_modules import random_module
from tvm.script import ir as I
from tvm.script import relax as R

import sits_tvm
from sits_tvm import SitsError
from sits_tvm.__main__ import _model

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")


def check(reader, paths):
    """Every file is read, or refused with an error of ours."""
    found = outcomes(reader, paths)
    wrong = {path.name: text for path, text in found.items() if text and "error[" not in text[:6]}
    assert not wrong
    return found


def write(folder, suffix, contents):
    folder.mkdir(exist_ok=True)
    paths = []
    for number, content in enumerate(contents):
        path = folder / f"{number}{suffix}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(path)
    return paths


def program(path):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    dims = ({0: torch.export.Dim("b", min=1, max=64)},)
    torch.export.save(torch.export.export(module, (torch.ones(2, 8),), dynamic_shapes=dims), path)
    return path


def onnx_bytes():
    h = onnx.helper
    weights = [
        onnx.numpy_helper.from_array(np.ones((16, 8), "float32"), "w"),
        onnx.numpy_helper.from_array(np.ones(8, "float32"), "b"),
    ]
    nodes = [h.make_node("MatMul", ["x", "w"], ["h"]), h.make_node("Add", ["h", "b"], ["y"])]
    x, y = (h.make_tensor_value_info(n, 1, ["n", size]) for n, size in (("x", 16), ("y", 8)))
    graph = h.make_graph(nodes, "graph", [x], [y], weights)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)]).SerializeToString()


def gguf_bytes(path):
    import test_gguf

    test_gguf.write(path, test_gguf.original())
    return path.read_bytes()


def damaged(folder, reader, count):
    """Files for a reader, `count` of each kind."""
    if reader == "executable":
        return executables(folder, count)
    if reader == "gguf":
        data = gguf_bytes(folder / "whole.gguf")
        heads = mutants(data[:1500], count)
        return write(folder / "gguf", ".gguf", (head + data[1500:] for head in heads))
    if reader == "onnx":
        return write(folder / "onnx", ".onnx", mutants(onnx_bytes(), count))
    data = program(folder / "whole.pt2").read_bytes()
    texts = [tvm.ir.save_json(random_module(seed, 4).mod) for seed in range(4)]
    texts = [mutant for text in texts for mutant in json_mutants(text, count // 4)]
    return [
        *write(folder / "pt2", ".pt2", mutants(data, count)),
        *write(folder / "json", ".json", texts),
        *write(folder / "cut", ".json", mutants(texts[0].encode(), count)),
    ]


def executables(folder, count):
    whole = folder / "whole"
    sits_tvm.build(wrong_inputs.linear(), "llvm", params=wrong_inputs.W).save(whole)
    paths = []
    for part in sorted(path.name for path in whole.iterdir()):
        data = (whole / part).read_bytes()
        contents = [*mutants(data, count)]
        if part.endswith(".json"):
            contents += [text.encode() for text in json_mutants(data.decode(), count)]
        for content in contents:
            paths.append(folder / f"{part}.{len(paths)}")
            shutil.copytree(whole, paths[-1])
            (paths[-1] / part).write_bytes(content)
    return paths


@pytest.mark.parametrize("reader", ["executable", "onnx"])
def test_damaged_files(reader, tmp_path):
    check(reader, damaged(tmp_path, reader, 10))


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["executable", "onnx", "gguf", "model"])
def test_many_damaged_files(reader, tmp_path):
    check(reader, damaged(tmp_path, reader, 200))


# Files that are made to harm


def refused(call, *args):
    with pytest.raises(SitsError) as raised:
        call(*args)
    return str(raised.value)


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def rewritten(path, edit):
    """A zip file, whose entries `edit` changes by name and content."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, edit(name, content))
    return path


def test_a_program_is_read(tmp_path):
    _, params = _model(program(tmp_path / "model.pt2"))
    assert list(params) == ["0.weight", "0.bias"]


def test_a_program_with_pickled_objects_does_not_run_them(tmp_path):
    harm = pickle.dumps(Harm(tmp_path / "harm"))

    def edit(name, content):
        return harm if name.endswith("sample_inputs/model.pt") else content

    refused(_model, rewritten(program(tmp_path / "model.pt2"), edit))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["opaque_obj_0", "custom_obj_0", "tensor_0"])
def test_constants_of_a_program_are_no_pickled_objects(name, tmp_path):
    """Of Python, of TorchScript, and in the place of a tensor."""
    entry = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"c": entry}})

    def edit(name, content):
        return config if name.endswith("model_constants_config.json") else content

    path = rewritten(program(tmp_path / "model.pt2"), edit)
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        harm = pickle.dumps(Harm(tmp_path / "harm"))
        archive.writestr(f"{folder}/data/constants/{name}", harm)
    text = refused(_model, path)
    assert "holds a pickled object" in text or "weights_only" in text.lower()
    assert not (tmp_path / "harm").exists()


def test_other_threads_unpickle_what_they_did(tmp_path):
    """A user's own checkpoint of Python objects, beside a program that is being read."""
    from sits_tvm.frontends._pt2 import _package, _without_pickle

    torch.save({"date": pathlib.PurePosixPath("a")}, tmp_path / "own.pt")

    def read():
        assert _package.pickle.loads(_package.pickle.dumps(pathlib.Path)) is pathlib.Path
        return torch.load(tmp_path / "own.pt", weights_only=False)

    with _without_pickle(), ThreadPoolExecutor() as pool:
        assert list(pool.submit(read).result()) == ["date"]
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "own.pt", weights_only=False)
    assert list(read()) == ["date"]


def test_expressions_of_a_program_are_not_run(tmp_path):
    harm = f"open('{tmp_path / 'harm'}', 'w')"

    def edit(name, content):
        return content.replace(b"Symbol(", b"(" + harm.encode() + b" or Symbol)(")

    text = refused(_model, rewritten(program(tmp_path / "model.pt2"), edit))
    assert "is no expression of sizes" in text
    assert not (tmp_path / "harm").exists()


def test_a_program_that_unpacks_to_much_is_refused(tmp_path):
    path = program(tmp_path / "model.pt2")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/weights/weight_9", bytes(1 << 20))
    assert "has 1048576 bytes when unpacked" in refused(_model, path)


@pytest.mark.parametrize("place", ["../outside.bin", "/etc/hostname", "link.bin"])
def test_external_data_of_onnx_stays_beside_the_file(place, tmp_path):
    (tmp_path / "outside.bin").write_bytes(bytes(512))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    model = onnx.load_from_string(onnx_bytes())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    tensor.external_data.add(key="length", value="512")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    assert "error[onnx-unreadable]" in refused(_model, folder / "model.onnx")


def header_of(path, edit):
    """params.safetensors with an edited header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0, 1 << 60]},
        {"data_offsets": [-8192, 0]},
        {"data_offsets": [64, 64 + 8192]},
        {"shape": [-1, 64]},
        {"shape": [1 << 40, 1 << 40]},
    ],
)
def test_tensors_lie_side_by_side(entry, tmp_path):
    path = wrong_inputs.saved(tmp_path / "model", "report.json", bytes)
    header_of(path / "params.safetensors", lambda header: header["w"].update(entry))
    assert "tensor w of" in refused(sits_tvm.load, path)


def test_a_library_with_one_changed_bit_is_not_loaded(tmp_path):
    path = wrong_inputs.saved(
        tmp_path / "model", "library.so", lambda data: data[:5000] + b"\x90" + data[5001:]
    )
    assert "error[library-not-loadable]" in refused(sits_tvm.load, path)


@I.ir_module
class Unknown:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), shape: R.Shape(ndim=2)):
        R.func_attr({"num_input": 2})
        y = R.call_packed("f", x, ty_args=R.Tensor((4,), "float32"))
        return R.reshape(y, shape)


def test_a_module_with_unknown_types_is_read(tmp_path):
    """The parameters of a packed function are null, and the values of a shape."""
    (path,) = write(tmp_path / "json", ".json", [tvm.ir.save_json(Unknown)])
    tvm.ir.assert_structural_equal(_model(path)[0], Unknown)


def test_a_module_that_refers_to_itself_is_refused(tmp_path):
    """TVM would end the process."""
    graph = json.loads(tvm.ir.save_json(wrong_inputs.linear()))
    number = next(i for i, node in enumerate(graph["nodes"]) if node["type"] == "ffi.Array")
    graph["nodes"][number]["data"][0] = number
    (path,) = write(tmp_path / "json", ".json", [json.dumps(graph)])
    assert f"object {number}, ffi.Array: element 0 is {number}" in refused(_model, path)


def test_a_module_that_refers_to_what_is_before_the_first_is_refused(tmp_path):
    graph = json.loads(tvm.ir.save_json(wrong_inputs.linear()))
    number = next(i for i, node in enumerate(graph["nodes"]) if node["type"] == "ir.Call")
    graph["nodes"][number]["data"]["args"] = -1
    (path,) = write(tmp_path / "json", ".json", [json.dumps(graph)])
    assert f"object {number}, ir.Call: args is -1" in refused(_model, path)


@pytest.mark.parametrize("whole", [True, False])
def test_a_call_without_arguments_is_refused(whole, tmp_path):
    """TVM would read what is not there."""
    nodes = json.loads(text := tvm.ir.save_json(wrong_inputs.linear()))["nodes"]
    number = next(i for i, node in enumerate(nodes) if node["type"] == "ir.Call")
    null = next(i for i, node in enumerate(nodes[:number]) if node["type"] == "None")
    graph = json.loads(text)
    data = graph["nodes"][number]["data"]
    if whole:
        data["args"] = null
    else:
        graph["nodes"][data["args"]]["data"][0] = null
    (path,) = write(tmp_path / "json", ".json", [json.dumps(graph)])
    assert f"object {number}, ir.Call: args is null" in refused(_model, path)

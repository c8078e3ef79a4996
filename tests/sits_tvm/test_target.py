import json
import os

import pytest
import tvm
import tvm_ffi
from tvm.target import Target

from sits_tvm.diagnostics import SitsError, collect
from sits_tvm.quick_parsing import load_tensor_intrinsics
from sits_tvm.target import parse_target


def attrs(target):
    return {str(name): value for name, value in parse_target(target).attrs.items()}


def complaints(target):
    with pytest.raises(SitsError) as caught:
        parse_target(target)
    return caught.value.diagnostics


@pytest.mark.parametrize(
    "spelling",
    [
        "cuda -arch=sm_90 -libs=cublas,cudnn",
        "cuda --arch=sm_90 --libs=cublas,cudnn",
        "cuda -arch sm_90 -libs cublas,cudnn",
        "cuda -arch=sm_90 -libs=cublas,cudnn --host=llvm",
        {"kind": "cuda", "arch": "sm_90", "libs": ["cublas", "cudnn"]},
        {"kind": "cuda", "arch": "sm_90", "libs": ("cublas", "cudnn"), "host": "llvm"},
        json.dumps({"kind": "cuda", "arch": "sm_90", "libs": ["cublas", "cudnn"]}),
        Target({"kind": "cuda", "arch": "sm_90", "libs": ["cublas", "cudnn"]}),
        Target({"kind": "cuda", "arch": "sm_90", "libs": ["cublas", "cudnn"]}, host="llvm"),
    ],
)
def test_all_spellings_mean_the_same(spelling):
    target = parse_target(spelling)
    assert target.kind.name == "cuda"
    assert target.host.kind.name == "llvm"
    assert target.attrs["arch"] == "sm_90"
    assert list(target.attrs["libs"]) == ["cublas", "cudnn"]


@pytest.mark.parametrize(
    "target",
    [
        "cuda -arch=sm_90a",
        "llvm",
        "llvm -mcpu=native",
        "llvm -mcpu=znver4 -num-cores=2 -mattr=+avx2,-avx512f",
        "sits/h200",
        "nvidia/nvidia-h100",
        'cuda -arch=sm_80 --host="llvm -mcpu=znver4"',
        "opencl",
        "c",
    ],
)
def test_parsing_the_result_again_changes_nothing(target):
    once = parse_target(target)
    assert tvm_ffi.structural_equal(parse_target(once), once)
    assert tvm_ffi.structural_equal(parse_target(str(once)), once)


def test_numbers_of_the_command_line_are_ints():
    found = attrs("llvm -mcpu=znver4 -num-cores=2")
    assert (found["mcpu"], found["num-cores"]) == ("znver4", 2)


# Opt-in shared memory per block, CUDA C++ Programming Guide, "compute capabilities", in KiB.
@pytest.mark.parametrize(
    ("arch", "kib"),
    [
        ("sm_75", 64),
        ("sm_80", 163),
        ("sm_86", 99),
        ("sm_87", 163),
        ("sm_89", 99),
        ("sm_90", 227),
        ("sm_90a", 227),
        ("sm_100a", 227),
        ("sm_120", 99),
    ],
)
def test_limits_come_from_the_architecture(arch, kib):
    found = attrs(f"cuda -arch={arch}")
    assert found["max_shared_memory_per_block"] == kib * 1024
    assert found["max_threads_per_block"] == found["max_num_threads"] == 1024
    assert found["registers_per_block"] == 65536
    assert found["thread_warp_size"] == 32


@pytest.mark.parametrize("tag", ["sits/h200", "nvidia/nvidia-h100", Target("nvidia/nvidia-h100")])
def test_a_tag_of_hopper_has_the_limits_of_hopper(tag):
    """TVM's own tag says 49152, the limit of static shared memory."""
    found = attrs(tag)
    assert found["arch"] == "sm_90a"
    assert found["max_shared_memory_per_block"] == 232448
    assert found["l2_cache_size_bytes"] == 50 << 20


def test_options_override_a_tag():
    assert attrs("nvidia/nvidia-h100 -max_threads_per_block=512")["max_threads_per_block"] == 512


def test_a_smaller_limit_of_the_user_stands():
    text = "cuda -arch=sm_90 -max_shared_memory_per_block=49152"
    assert attrs(text)["max_shared_memory_per_block"] == 49152


def test_native_is_the_cpu_of_this_machine():
    found = attrs("llvm -mcpu=native")
    assert found["mcpu"] == tvm.target.codegen.llvm_get_system_cpu()
    assert found["num-cores"] == len(os.sched_getaffinity(0))
    assert attrs("llvm -mcpu=native -num-cores=1")["num-cores"] == 1


def test_plain_llvm_stays_generic_and_says_so():
    with collect() as notes:
        assert "mcpu" not in attrs("llvm")
    assert [note.code for note in notes] == ["target-generic-cpu"]
    with collect() as notes:
        parse_target("llvm -mcpu=znver4")
        parse_target("cuda -arch=sm_90")
    assert notes == []


def test_bare_cuda_takes_the_gpu_of_this_machine_or_none():
    """TVM falls back to sm_50."""
    if tvm.cuda(0).exist:
        assert attrs("cuda")["arch"] == "sm_" + tvm.cuda(0).compute_version.replace(".", "")
        return
    for bare in ("cuda", {"kind": "cuda"}):
        (error,) = complaints(bare)
        assert error.code == "target-arch-missing"
        assert "cuda -arch=sm_90" in error.help


@pytest.mark.parametrize(
    ("target", "code", "found", "help"),
    [
        ("cuda -arch=sm_9999", "target-arch-unknown", "'sm_9999'", "sm_90"),
        ("cuda -arch=90", "target-arch-unknown", "'90'", "did you mean sm_90?"),
        ("cuda -arch=compute_90a", "target-arch-unknown", "'compute_90a'", "did you mean sm_90a?"),
        ("cuda -arch=sm_50", "target-arch-unknown", "'sm_50'", "sm_75"),
        ("cuda -arch=", "target-arch-unknown", "''", "sm_90"),
        ("nvptx -mcpu=sm_9", "target-arch-unknown", "'sm_9'", "sm_90"),
        (Target({"kind": "cuda", "arch": "sm_9999"}), "target-arch-unknown", "'sm_9999'", "sm_90"),
        ({"kind": "cuda", "arch": 90}, "target-option-type", "arch=90", "sm_90"),
        ({"kind": "cuda", "arch": None}, "target-option-type", "arch=None", "sm_90"),
        ("cuda -arch=sm_90 -lib=cublas", "target-option-unknown", "lib='cublas'", "libs"),
        ("cuda -arch=sm_90 -mcpu=znver4", "target-option-unknown", "mcpu='znver4'", "--host="),
        ("cuda -arch=sm_90 -thread_warp_size=0", "target-option-type", "thread_warp_size=0", ""),
        (
            "cuda -arch=sm_90 -max_shared_memory_per_block=0",
            "target-option-type",
            "=0",
            "leave it out",
        ),
        ("llvm -num-cores=0", "target-option-type", "num-cores=0", "write -num-cores=2"),
        ("cuda -arch=sm_90 -max_num_threads=2048", "target-limit", "2048", "leave"),
        ("cuda -arch=sm_86 -max_shared_memory_per_block=232448", "target-limit", "101376", ""),
        ("cuda -arch=sm_90 --host=cuda", "target-host", "'cuda'", "--host=llvm"),
        ("cuda -arch=sm_90 --host='llvm -mcpu=no'", "target-mcpu-unknown", "'no'", "did you mean"),
        ("llvm -mcpu=znver9", "target-mcpu-unknown", "'znver9'", "znver4"),
        ("llvm -mtriple=riscv64-linux-gnu -mcpu=native", "target-mcpu-unknown", "native", "name"),
        ("llvm -mtriple=bogus-linux", "target-triple-unknown", "'bogus-linux'", "x86_64"),
        ("llvm -mattr=+avx2,+avxx", "target-feature-unknown", "'+avxx'", "+avx2"),
        ("llvm -mattr=avx2", "target-feature-unknown", "'avx2'", "+avx2"),
        ("llvm -num-cores=two", "target-option-type", "num-cores='two'", "int"),
        ("llvm -num-cores=²", "target-option-type", "num-cores='²'", "int"),
        ("llvm -num-cores=+-2", "target-option-type", "num-cores='+-2'", "int"),
        ({"kind": "llvm", "num-cores": "2"}, "target-option-type", "num-cores='2'", "write 2"),
        ({"kind": "llvm", "num-cores": True}, "target-option-type", "num-cores=True", ""),
        ({"kind": "llvm", "mattr": "+avx2"}, "target-option-type", "mattr='+avx2'", "list"),
        ("cud -arch=sm_90", "target-kind-unknown", "'cud'", "cuda"),
        ("vulkan", "target-kind-unsupported", "'vulkan'", "llvm"),
        ("rocm", "target-arch-missing", "rocm", "rocm -mcpu="),
        ("nvidia/h100", "target-tag-unknown", "'nvidia/h100'", "nvidia/nvidia-h100"),
        ({"tag": "nvidia/nvidia-h100", "kind": "llvm"}, "target-kind-unknown", "cuda", ""),
        ({"arch": "sm_90"}, "target-kind-missing", "sm_90", "cuda -arch=sm_90"),
        (None, "target-type", "None", "cuda -arch=sm_90"),
        (90, "target-type", "90", "cuda -arch=sm_90"),
        ("", "target-syntax", "''", "cuda -arch=sm_90"),
        ("cuda arch=sm_90", "target-syntax", "'arch=sm_90'", "cuda -arch=sm_90"),
        ("cuda -arch=sm_90 -arch=sm_80", "target-syntax", "twice", ""),
        ('llvm "-mcpu', "target-syntax", "quotation", ""),
        ('{"kind": cuda}', "target-syntax", "JSON", ""),
    ],
)
def test_says_what_is_wrong_and_what_to_write(target, code, found, help):
    (error,) = complaints(target)
    assert error.code == code
    assert found in error.message
    assert help in error.help


def test_lists_everything_that_is_wrong():
    errors = complaints({"kind": "cuda", "arch": "sm_9", "libs": "cublas", "foo": 1})
    assert {error.code for error in errors} == {
        "target-option-type",
        "target-option-unknown",
        "target-arch-unknown",
    }


def test_the_dictionary_of_the_caller_is_left_alone():
    given = {"kind": "cuda", "arch": "sm_90"}
    parse_target(given)
    assert given == {"kind": "cuda", "arch": "sm_90"}


def test_every_tag_of_tvm_parses_or_says_why():
    codes = {code for tag in tvm.target.list_tags() for code in codes_of(tag)}
    assert codes == {"target-arch-unknown", "target-kind-unsupported", "target-mcpu-unknown"}
    assert attrs("apple/m1-gpu")["max_threads_per_block"] == 1024  # its host has a CPU alias


def codes_of(target):
    try:
        parse_target(target)
        return []
    except SitsError as error:
        return [problem.code for problem in error.diagnostics]


def test_metaschedule_takes_the_limits_from_the_arch():
    """A CUDA target with the architecture alone stops there with a missing attribute."""
    from tvm import te
    from tvm.s_tir import meta_schedule as ms

    load_tensor_intrinsics()
    a, b = te.placeholder((64, 64), name="a"), te.placeholder((64, 64), name="b")
    k = te.reduce_axis((0, 64), name="k")
    c = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, c])})

    def design_space(target):
        context = ms.TuneContext(
            mod, target=target, space_generator="post-order-apply", num_threads=1
        )
        return context.generate_design_space()

    with pytest.raises(Exception, match="max_threads_per_block"):
        design_space(Target({"kind": "cuda", "arch": "sm_90"}, host="llvm"))
    assert design_space(parse_target("cuda -arch=sm_90"))

"""What `tune` measures of CUDA candidates, as far as it goes without a GPU: they build, and the
text of one, run on the host, passes the check of the plain function, which LLVM compiles."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from cuda_text import CudaText
from tvm.s_tir import meta_schedule as ms

from sits_tvm import parse_target
from sits_tvm.tuning import measure
from sits_tvm.tuning.search import Search, values_of
from sits_tvm.tuning.tasks import Task
from tir_schedules.matmul_cuda.rule import TensorCoreMatmul
from tir_schedules.records.workloads import MatmulWorkload

GPU = parse_target("cuda -arch=sm_90")
RULE = TensorCoreMatmul()
HALF = MatmulWorkload("int4_matmul", 64, 128, 32, False, "float16", "float16")
INT8 = replace(HALF, family="int8_matmul", dtype="int8")
CALLS = ms.runner.EvaluatorConfig(number=1, repeat=2, min_repeat_ms=0)


class OnHost:
    """A built candidate whose kernels run on the host, and take no time."""

    def __init__(self, func):
        self.kernel, self.flushed = CudaText(func, GPU), []

    def __getitem__(self, name):
        return self

    def __call__(self, *arguments):
        arrays = [np.array(tensor.numpy()) for tensor in arguments]
        self.kernel(*arrays)
        arguments[-1].copyfrom(arrays[-1])

    def time_evaluator(self, name, device, number, repeat, cache_flush_bytes):
        self.flushed.append(cache_flush_bytes)
        return lambda *_: SimpleNamespace(results=[1e-6] * repeat)


@pytest.mark.parametrize("workload", [HALF, INT8], ids=["half", "int8"])
def test_a_wrong_result_is_a_failure(workload):
    plain = RULE.prim_func(workload, 8)
    ((bucket, space),) = RULE.spaces(plain, GPU).items()
    task = Task(RULE, workload, bucket, space, GPU)
    check = measure.check_of(task)
    candidate = task.search_space()
    infos = [info.as_json() for info in ms.arg_info.ArgInfo.from_entry_func(candidate.mod, True)]
    arguments = measure.allocate(check, tvm.cpu(), infos, 1)
    assert {tensor.device for tensor in arguments[0]} == {tvm.cpu()}
    module = OnHost(RULE.apply(plain, GPU, False).mod["main"])
    assert measure.evaluate(check, module, tvm.cpu(), CALLS, arguments) == [1e-6, 1e-6]
    assert module.flushed[0] > 50 << 20  # L2 of an H200
    wrong = check.expected.copy()
    wrong[-1, -1] += 2 * check.limit
    with pytest.raises(ValueError, match="wrong result: off by"):
        measure.evaluate(replace(check, expected=wrong), module, tvm.cpu(), CALLS, arguments)


def test_candidates_have_kernels_and_build():
    plain = RULE.prim_func(HALF, 8)
    ((bucket, space),) = RULE.spaces(plain, GPU).items()
    task = Task(RULE, HALF, bucket, space, GPU)
    drawn = Search(task, seed=1).draw(8)
    assert len(drawn) == 8
    work = RULE.work(plain, GPU)
    for schedule in drawn:
        assert not isinstance(work(space.with_values(values_of(schedule))), str)
    built = measure.build_candidate(drawn[0].mod, GPU, None)
    assert [module.kind for module in built.imports] == ["cuda"]

"""Where control goes in real machine code, against the graph that nvdisasm draws of it."""

import re
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from cuda_sources import needs_nvcc

from sits_tvm.device_code.nvcc import compile_text, find_toolkit
from sits_tvm.device_code.sass import disassemble
from sits_tvm.device_code.sass_loops import _successors, find_loops, times_executed

KERNELS = {
    "ways": r"""
extern "C" __global__ void ways(const float4* a, float4* o, int n, int* lock, long long d) {
  if (threadIdx.x >= n) return;
  while (atomicAdd(lock, 0) == 0);
  float4 sum = make_float4(0, 0, 0, 0);
  if (n > 7) {
    for (int i = 0; i < n; i++) {
      float4 x = a[i * 32 + threadIdx.x];
      if (x.x > 0) { sum.x += x.y; continue; }
      if (x.z > 9) break;
      sum.y += __shfl_xor_sync(0xffffffff, x.w, 1) * sqrtf(x.z);
    }
  } else {
    o[5] = make_float4(1, 1, 1, 1);
    return;
  }
  __syncthreads();
  sum.z = (float)((long long)clock64() / d);
  o[threadIdx.x] = sum;
}
""",
    "loops": r"""
extern "C" __global__ void loops(const float* a, float* o, int n, int m) {
  for (int i = threadIdx.x; i < n; i += 32) {
    float sum = 0;
    for (int j = 0; j < m; j++) {
      int k = j;
      do { sum += a[i * m + k]; k /= 3; } while (k > 0);
    }
    o[i] = sum;
  }
}
""",
}


@pytest.fixture(scope="module", params=[(n, a) for n in KERNELS for a in ("sm_80", "sm_90")])
def kernel(request):
    """Name, instructions, and the edges of nvdisasm's graph that a converged warp takes."""
    name, arch = request.param
    tools = find_toolkit()
    with tempfile.TemporaryDirectory() as folder:
        cubin, _ = compile_text(tools, arch, KERNELS[name], Path(folder))
        command = [tools.nvdisasm, "-bbcfg", "-poff", cubin]
        graph = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code = disassemble(tools.nvdisasm, cubin)[name]
    return name, code, {(a, b) for a, b in edges(graph) if not diverges(code[a], b == a + 1)}


def diverges(line, goes_on):
    return line.opcode.startswith("BRA.CONV" if goes_on else "BRA.DIV")


def edges(graph):
    """(from, to) by index of instruction: in a block from each to the next, and between blocks."""
    blocks = {}
    for label, text in re.findall(r'^"([^"\n]+)"\n\[label="(.*)"\]$', graph, re.MULTILINE):
        offsets = re.findall(r"(?:\\l|>|^)([0-9a-f]{4,}):\\ ", text)
        blocks[label] = [int(offset, 16) // 16 for offset in offsets]
    inside = {pair for block in blocks.values() for pair in pairwise(block)}
    between = re.findall(r'^"([^"]+)":\w+:\w -> "([^"]+)":', graph, re.MULTILINE)
    return inside | {(blocks[a][-1], blocks[b][0]) for a, b in between}


@needs_nvcc
def test_control_goes_where_nvdisasm_says(kernel):
    """It draws no edge to the place where threads are to meet, which is behind BSYNC, and none
    from there to other code."""
    _, code, expected = kernel
    times = times_executed(code)
    found = {
        (index, after)
        for index, afters in enumerate(_successors(code))
        for after in afters
        if times[index] and not (code[index].family == "BSSY" and after != index + 1)
    }
    assert found == {(a, b) for a, b in expected if times[a]}
    assert len(found) > 50


@needs_nvcc
def test_nothing_that_nvdisasm_leads_to_is_left_out(kernel):
    _, code, expected = kernel
    reached, new = set(), {0}
    while new:
        reached |= new
        new = {b for a, b in expected if a in new} - reached
    assert reached == {index for index, times in enumerate(times_executed(code)) if times}
    assert len(reached) < len(code)


@needs_nvcc
def test_loops_of_the_source_are_found(kernel):
    """Three in one another; or a wait before a loop."""
    name, code, _ = kernel
    loops = find_loops(code)
    around = [[loop for loop in loops if inner.is_inside(loop)] for inner in loops]
    assert max(map(len, around)) == {"loops": 2, "ways": 0}[name]
    assert len(loops) >= 2
    assert ("CALL" in {line.family for line in code}) == (name == "ways")

"""The kernel that dlight's GEMV rule makes of one row of W4A16, weights in the order of rows."""

import math
import tempfile
from functools import cache
from pathlib import Path

import tvm
from tvm.ir import IRModule
from tvm.s_tir import dlight

from sits_tvm import QuantSpec, parse_target
from sits_tvm.device_code import cuda_sources, find_toolkit, record_launches
from sits_tvm.device_code.nvcc import compile_text, read_log
from sits_tvm.device_code.sass import disassemble
from sits_tvm.tuning.static_model import KernelLaunch
from tir_schedules.matmul.int4_matmul import int4_matmul


@cache
def dlight_gemv():
    """W4A16 g128, N = K = 4096: machine code for sm_90, and launch."""
    target = parse_target("cuda -arch=sm_90")
    func = int4_matmul(1, 4096, 4096, QuantSpec(), "float16", "rows")
    with target, record_launches() as launches:
        scheduled = dlight.ApplyDefaultSchedule(dlight.gpu.GEMV())(IRModule({"main": func}))
        (source,) = cuda_sources(tvm.compile(scheduled, target=target))
    ((name, launch),) = launches.items()
    tools = find_toolkit()
    with tempfile.TemporaryDirectory() as folder:
        cubin, log = compile_text(tools, "sm_90", source, Path(folder))
        code = disassemble(tools.nvdisasm, cubin)[name]
        ((_, registers, _, shared),) = read_log(log)
    return code, KernelLaunch(
        blocks=math.prod(map(int, launch.grid)),
        threads=math.prod(map(int, launch.block)),
        registers=registers,
        shared=shared + launch.dynamic_smem,
        hbm_bytes=4096 * (4096 // 2 + 4096 // 128 * 2 + 2 * 2),
    )

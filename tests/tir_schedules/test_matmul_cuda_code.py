"""INT4 products as machine code: instructions per weight and per product, loads, units, no spills.

The lines are those of README's section on Hopper. A count is an upper bound, no speed.
"""

import pytest
import tvm
from matmul_cuda_machine_code import machine_code
from matmul_cuda_runs import layout_of, plain, scheduled

from sits_tvm import parse_target
from sits_tvm.device_code import compile_device_code
from sits_tvm.device_code.sass import count
from sits_tvm.device_code.sass_loops import MMA
from sits_tvm.device_code.sass_pipes import width
from sits_tvm.diagnostics import collect

SLOW = pytest.mark.slow
ZEROS = {"symmetric": False}
SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (28672, 8192)]


def cases(quick):
    """Shapes and numbers of rows; but for `quick` they are slow."""
    for shape in SHAPES:
        for rows in (1, 8, 16):
            yield pytest.param(*shape, rows, marks=() if (shape, rows) in quick else SLOW)


def assert_clean(code, product):
    """No spills, local memory or calls, weights by 16 bytes, products on the right unit."""
    found = count(code.instructions)
    assert (code.spills, found["LDL"], found["STL"], found["CALL"]) == (0, 0, 0, 0)
    products = {line.opcode for line in code.instructions if line.family in MMA}
    assert products == {product}
    wide = sum(width(line.opcode) == 16 for line in code.instructions if line.family == "LDGSTS")
    per_stage = code.tile.channel_tiles * code.tile.step_units * 512 // 16 / code.tile.threads
    assert wide >= per_stage * code.tile.stages


@pytest.mark.parametrize(("n", "k", "rows"), cases({((4096, 4096), 1), ((28672, 8192), 16)}))
def test_float16_needs_two_instructions_per_weight(n, k, rows):
    code = machine_code(n, k, rows, group_size=128)
    assert_clean(code, "HMMA.16816.F32")
    assert code.per_weight() <= 2.0


@pytest.mark.parametrize(("n", "k", "rows"), cases({((4096, 14336), 1)}))
def test_zero_points_cost_little(n, k, rows):
    code = machine_code(n, k, rows, group_size=128, symmetric=False)
    assert_clean(code, "HMMA.16816.F32")
    assert code.per_weight() <= 2.0


@pytest.mark.parametrize(("n", "k", "rows"), cases({((4096, 4096), 1)}))
def test_int8_activations_per_channel_need_one_instruction_per_weight(n, k, rows):
    code = machine_code(n, k, rows, "int8", group_size=-1)
    assert_clean(code, "IMMA.16832.S8.S8")
    assert code.per_weight() <= 1.0


@pytest.mark.parametrize(("n", "k", "rows"), cases({((4096, 4096), 16)}))
def test_int8_activations_and_groups(n, k, rows):
    code = machine_code(n, k, rows, "int8", group_size=128)
    assert_clean(code, "IMMA.16832.S8.S8")
    assert code.per_weight() <= 1.5


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 4.1), pytest.param("sm_90", 3.5, marks=SLOW)])
def test_many_rows_take_three_and_a_half_instructions_per_product(arch, most):
    code = machine_code(4096, 4096, 4096, group_size=128, arch=arch)
    assert_clean(code, "HMMA.16816.F32")
    assert code.per_product() <= most


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=SLOW)])
def test_many_rows_of_int8_groups(arch):
    """Scaling a sum takes two instructions for each product."""
    code = machine_code(4096, 4096, 4096, "int8", group_size=128, arch=arch)
    assert_clean(code, "IMMA.16832.S8.S8")
    assert code.per_product() <= 5.4


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=SLOW)])
def test_other_architectures_and_types(arch, dtype):
    code = machine_code(4096, 4096, 8, dtype=dtype, arch=arch, group_size=128, symmetric=False)
    assert_clean(code, "HMMA.16816.F32" + (".BF16" if dtype == "bfloat16" else ""))


@pytest.mark.parametrize(
    ("rows", "form", "product", "per_weight", "per_product"),
    [
        (32, {}, "HGMMA.64x32x16.F32", 2.4, 19),
        (64, ZEROS, "HGMMA.64x64x16.F32", 2.6, 20),
        (4096, {}, "HGMMA.64x128x16.F32", 3.7, 30),
        (64, {"activation": "int8", "group_size": -1}, "IGMMA.64x64x32.S8.S8", 1.3, 18),
        *(
            pytest.param(*one, marks=SLOW)
            for one in (
                (32, ZEROS, "HGMMA.64x32x16.F32", 2.5, 20),
                (64, {}, "HGMMA.64x64x16.F32", 2.5, 19),
                (4096, ZEROS, "HGMMA.64x128x16.F32", 3.8, 31),
                (4096, {"dtype": "bfloat16"}, "HGMMA.64x128x16.F32.BF16", 4.0, 32),
                (64, {"activation": "int8"}, "IGMMA.64x64x32.S8.S8", 2.75, 42),
                (4096, {"activation": "int8"}, "IGMMA.64x128x32.S8.S8", 4.5, 72),
                (4096, {**ZEROS, "activation": "int8"}, "IGMMA.64x128x32.U8.S8", 4.8, 76),
            )
        ),
    ],
)
def test_products_of_warpgroups(rows, form, product, per_weight, per_product):
    """On sm_90a; ptxas adds no waits."""
    with collect() as notes:
        code = machine_code(4096, 4096, rows, **{"group_size": 128, **form})
    assert not [note for note in notes if note.code == "wgmma-serialized"]
    assert_clean(code, product)
    assert code.per_weight() <= per_weight
    assert code.per_product() <= per_product


@SLOW
@pytest.mark.parametrize("activation", [None, "int8"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_a_symbolic_number_of_rows_spills_nothing(arch, activation):
    target = parse_target(f"cuda -arch={arch}")
    kernel = scheduled(plain(layout_of(1024, 4096, activation, group_size=128), None), target)
    kernel = kernel.with_attr({"tirx.is_scheduled": True, "global_symbol": "main"})
    executable = tvm.compile(tvm.IRModule({"main": kernel}), target=target)
    found = compile_device_code(executable, arch).kernels
    assert {row.name: row.spills for row in found if row.spills} == {}

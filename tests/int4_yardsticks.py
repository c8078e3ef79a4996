"""Published INT4 kernels by the machine code that CUDA 13.0 makes of them for sm_90a.

Counted in the main loop, per thread; every weight is decoded once per tile of rows.
"""

from collections import namedtuple

from sits_tvm.device_code.sass_pipes import demand
from sits_tvm.tuning.static_model import KernelLaunch

Yardstick = namedtuple(
    "Yardstick", "kind mma rows columns k warps registers shared_kib stages per_mma per_weight alu"
)
"""`kind` of weights and activations, tile of rows x columns x k, and instructions: per MMA, per
weight, and of the ALU to decode a weight. What is not known is None."""

YARDSTICKS = {
    "Marlin": Yardstick(
        "W4A16 g128", "HMMA.16816.F32", 16, 128, 128, 8, 126, 96, 4, 9.8, 2.45, 1.55
    ),
    "Marlin, per channel": Yardstick(
        "W4A16 per channel", "HMMA.16816.F32", 16, 128, 128, 8, 128, 96, 4, 7.0, 1.74, 1.07
    ),
    "Marlin, 64 rows": Yardstick(
        "W4A16 g128", "HMMA.16816.F32", 64, 256, 64, 8, 254, 96, 4, 3.3, 3.30, 1.58
    ),
    "QQQ": Yardstick(
        "W4A8 per channel", "IMMA.16816.S8.S8", 16, 128, 128, 8, 128, 40, 4, 3.9, 0.98, 0.36
    ),
    "QQQ, g128": Yardstick(
        "W4A8 g128", "IMMA.16816.S8.S8", 16, 128, 128, 8, 170, 41, 4, 11.0, 2.75, 2.0
    ),
    "QServe": Yardstick(
        "W4A8 per channel", "IMMA.16832.S8.S8", 32, 64, 128, 4, 96, 24, 3, 9.8, 2.45, 0.38
    ),
    "QServe, g128": Yardstick(
        "W4A8 g128", "IMMA.16832.S8.S8", 32, 64, 128, 4, 112, 24, 3, 18.1, 4.53, 2.0
    ),
    "QServe, 128 rows": Yardstick(
        "W4A8 per channel", "IMMA.16832.S8.S8", 128, 64, 64, 4, 160, 40, 4, 5.9, 2.95, 0.38
    ),
    "QServe, 128 rows, g128": Yardstick(
        "W4A8 g128", "IMMA.16832.S8.S8", 128, 64, 64, 4, 168, 40, 4, 10.7, 5.36, 2.0
    ),
    "CUTLASS 55, shuffled": Yardstick(
        "W4A16 g128", "HGMMA.64x128x16.F32.BF16", 128, 128, 64, 12, 168, 200, 9, 36, 4.50, 1.94
    ),
    "CUTLASS 55, not shuffled": Yardstick(
        "W4A16 g128", "HGMMA.64x128x16.F32.BF16", 128, 128, 64, 12, 168, 200, 9, 69, 8.66, 2.9
    ),
    "llm-awq GEMV": Yardstick(
        "W4A16 g128", None, 1, None, None, 8, 42, 1.5, 1, None, 3.09, 2.1
    ),
}  # fmt: skip


def yardstick_demand(stick, weights, arch, mma=None):
    """The demand of a thread that decodes so many weights; `mma` in place of that of the stick."""
    total, alu = round(stick.per_weight * weights), round(stick.alu * weights)
    products = round(stick.per_weight / stick.per_mma * weights)
    rest = total - alu - products
    return demand({mma or stick.mma: products, "LOP3.LUT": alu, "BRA": rest}, arch)


def yardstick_launch(stick, n, k, rows, blocks):
    """With weights and scales of W[n, k], activations and outputs read and written once."""
    width = 1 if "W4A8" in stick.kind else 2
    scales = n * k // 128 * 2 if "g128" in stick.kind else n * 2
    return KernelLaunch(
        blocks=blocks,
        threads=32 * stick.warps,
        registers=stick.registers,
        shared=int(stick.shared_kib * 1024),
        hbm_bytes=n * k // 2 + scales + rows * k * width + rows * n * 2,
        in_flight=(stick.stages - 1) * stick.columns * stick.k // 2,
    )

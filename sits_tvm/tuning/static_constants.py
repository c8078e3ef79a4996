"""The numbers of the static model, but for the rates of pipes, which `sass_pipes` has.

Each is written down once, so that one run on a device can calibrate the model. A change of any of
them, or of the model, is a new `MODEL_VERSION`: estimates of different versions do not compare.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL_VERSION = 4

TIE = 0.1
"""Estimates that differ by less than this share are in no order (research on such models: their
errors are larger)."""

LOADED_LATENCY = 1e-6
"""Seconds from a load to its data while memory is busy. Assumed, not measured: about 1 us, with
which 36 KiB in flight per SM are what 4.8 TB/s ask for."""


@dataclass(frozen=True)
class Device:
    """A GPU. Rates are those of its data sheet, which no kernel quite reaches.

    Attributes
    ----------
    clock : float
        Hz at which the data sheet's peak of dense FP16 products holds.
    hbm, l2 : float
        Bytes per second from memory, and out of the L2 cache to all SMs.
    l2_bytes : int
        Of the L2 cache.
    shared : int
        Bytes of shared memory of an SM, and `reserved` of them per block of threads.
    """

    name: str
    arch: str
    sms: int
    clock: float
    hbm: float
    l2: float
    l2_bytes: int
    shared: int
    reserved: int = 1024
    registers: int = 65536
    warps: int = 64
    blocks: int = 32

    def __str__(self) -> str:
        """What estimates are of: they compare with no others."""
        return f"{self.name}, static model {MODEL_VERSION}"


# SMs, clock and memory: data sheets (A100 SXM 80 GB: 312 TFLOP/s at 1.41 GHz, 2039 GB/s; H100 SXM:
# 989 TFLOP/s, which is 1.83 GHz, 3.35 TB/s; H200: 4.8 TB/s). L2: whitepapers, 40 and 50 MB; of A100
# 5120 bytes per clock; nothing is published for H100, taken as equal. Limits of an SM: CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability": 164 and 228 KiB of shared
# memory.
A100 = Device("A100", "sm_80", 108, 1.41e9, 2.039e12, 5120 * 1.41e9, 40 << 20, 164 << 10)
H100 = Device("H100", "sm_90", 132, 1.83e9, 3.35e12, 5120 * 1.83e9, 50 << 20, 228 << 10)
H200 = Device("H200", "sm_90", 132, 1.83e9, 4.8e12, 5120 * 1.83e9, 50 << 20, 228 << 10)

REGISTER_UNIT = 256
"""Registers are given to a warp in this number, and SMs take warps by fours (CUDA's occupancy
calculator)."""

SHARED_UNIT = 128
"""Bytes in which shared memory is given to a block, likewise."""


def device_of(arch: str) -> Device:
    """The device that an architecture is estimated for: A100 or H200.

    Raises
    ------
    ValueError
        For other architectures than sm_80, sm_90 and sm_90a.
    """
    for device in (A100, H200):
        if device.arch == arch.rstrip("a"):
            return device
    raise ValueError(f"there is no static model of {arch!r}; there is one of sm_80 and sm_90")

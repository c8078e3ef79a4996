"""The CUDA text of an executable, compiled by nvcc, and what its machine code is."""

from .check import (
    DeviceCode,
    check_device_code,
    compile_device_code,
    cuda_sources,
    require_toolkit,
)
from .launches import Launch, check_launches, record_launches
from .nvcc import Toolkit, find_toolkit

__all__ = [
    "DeviceCode",
    "Launch",
    "Toolkit",
    "check_device_code",
    "check_launches",
    "compile_device_code",
    "cuda_sources",
    "find_toolkit",
    "record_launches",
    "require_toolkit",
]

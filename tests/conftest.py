"""Every test runs with a fixed seed, and every pass in it leaves well-formed IR behind."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import numpy as np
import pytest
from tvm.ir.transform import PassContext
from tvm.relax.ir.instrument import WellFormedInstrument

from sits_tvm.quick_parsing import quick_stack

os.environ.setdefault("SITS_TVM_CACHE", "")  # each test compiles what it looks at


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """TVMScript of test files is parsed while they are imported: half of the time of that."""
    with quick_stack():
        return (yield)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def well_formed() -> Iterator[None]:
    with PassContext(instruments=[WellFormedInstrument()]):
        yield

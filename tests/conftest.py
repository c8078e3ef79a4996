"""Every test runs with a fixed seed, and every pass in it leaves well-formed IR behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from tvm.ir.transform import PassContext
from tvm.relax.ir.instrument import WellFormedInstrument

os.environ.setdefault("SITS_TVM_CACHE", "")  # each test compiles what it looks at


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def well_formed() -> Iterator[None]:
    with PassContext(instruments=[WellFormedInstrument()]):
        yield

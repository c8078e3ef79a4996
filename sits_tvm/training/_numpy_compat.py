"""Let TVM's optimizers and `Trainer` work with NumPy from 2.3 on.

``numpy.dtype(x)`` asks x for an attribute ``dtype``. Up to NumPy 2.2 that could be anything that
names a dtype; since then it must be a `numpy.dtype`. The ``dtype`` of TVM's `PrimType` (what
``var.ty.dtype`` is) is none, and two methods of `tvm.relax.training` give NumPy a PrimType where
they mean its dtype: `Adam.init`, through `Optimizer.dtype`, and
`Trainer.xaiver_uniform_init_params`. Importing this module replaces them, if NumPy is one of these.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm.ir import PrimType
from tvm.relax.training import Trainer
from tvm.relax.training.optimizer import Optimizer

_set_params_and_dtype = Optimizer._set_params_and_dtype


def _numpy_takes_prim_types() -> bool:
    try:
        return bool(np.dtype(PrimType("float32")) == "float32")
    except (TypeError, ValueError):
        return False


def _set_params_and_raw_dtype(self: Optimizer, params: list[tvm.relax.Var]) -> None:
    _set_params_and_dtype(self, params)
    self.dtype = str(self.dtype)


def _init_params(self: Trainer) -> None:
    """TVM's formula: uniform within ±sqrt(6 / sum of the extents), see Glorot and Bengio 2010."""
    self._params = []
    for variable in self._param_vars:
        shape = [int(extent) for extent in variable.ty.shape]
        values = np.sqrt(6.0 / np.sum(shape)) * np.random.uniform(-1.0, 1.0, shape)
        array = values.astype(str(variable.ty.dtype))
        self._params.append(tvm.runtime.tensor(array, self.device))


if not _numpy_takes_prim_types():
    Optimizer._set_params_and_dtype = _set_params_and_raw_dtype
    Trainer.xaiver_uniform_init_params = _init_params

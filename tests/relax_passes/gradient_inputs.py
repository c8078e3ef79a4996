"""A case of a gradient, a table of them, and the arrays that the tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
_RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """``ours(bb, *vars)`` and ``theirs(*tensors)``, at `arrays`; `shapes` may be symbolic."""

    ours: Callable
    theirs: Callable
    arrays: tuple
    shapes: tuple


class Cases(dict[str, Case]):
    def add(self, name, ours, theirs, *arrays, shapes=None):
        self[name] = Case(ours, theirs, arrays, tuple(shapes or [a.shape for a in arrays]))


def draw(*shape):
    return _RNG.standard_normal(shape).astype("float32")


def chain(f):
    return lambda bb, *xs: f(*xs)


X, Y, W = draw(3, 8), draw(3, 8), draw(8, 5)
POSITIVE, INSIDE, TIED = np.abs(X) + 0.5, np.tanh(X) * 0.9, np.round(X)
ROWS = [N, 8]  # the symbolic shape of X

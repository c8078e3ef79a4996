"""Random chains of views, against NumPy's views of 0, 1, 2, …"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.relax import op as R

from tests.relax_passes.index_expressions import View, evaluate, function_of, view_of

b, s = tirx.Var("b", "int64"), tirx.Var("s", "int64")


class Chain:
    """A chain of views of x, in Relax for symbolic b and s, in NumPy for a few of their values."""

    SIZES = ({"b": 1, "s": 1}, {"b": 2, "s": 3}, {"b": 3, "s": 0}, {"b": 1, "s": 4})

    def __init__(self, bb: relax.BlockBuilder, shape: Sequence, x: relax.Var) -> None:
        self.bb, self.expr = bb, x
        self.arrays = [self.numbered(shape, sizes) for sizes in self.SIZES]

    @staticmethod
    def numbered(shape: Sequence, sizes: dict[str, int]) -> np.ndarray:
        dims = [int(evaluate(d, {b: sizes["b"], s: sizes["s"]})) for d in map(as_index, shape)]
        return np.arange(np.prod(dims, dtype=int)).reshape(dims)

    @property
    def shape(self) -> list:
        return list(self.expr.ty.shape)

    def add(self, call: relax.Expr, view: Callable[[np.ndarray], np.ndarray]) -> None:
        self.expr = self.bb.emit(call)
        self.arrays = [view(array) for array in self.arrays]

    def concrete(self, dims: Sequence, k: int) -> list[int]:
        sizes = self.SIZES[k]
        return [int(evaluate(as_index(d), {b: sizes["b"], s: sizes["s"]})) for d in dims]

    def reshape(self, dims: list) -> None:
        arrays = [a.reshape(self.concrete(dims, k)) for k, a in enumerate(self.arrays)]
        self.expr, self.arrays = self.bb.emit(R.reshape(self.expr, dims)), arrays


def as_index(dim: object) -> tirx.Expr:
    return tirx.IntImm("int64", dim) if isinstance(dim, int) else dim


def merge(chain: Chain, draw: Callable) -> None:
    shape = chain.shape
    at = draw(st.integers(0, len(shape) - 1))
    merged = shape[at] if at + 1 == len(shape) else shape[at] * shape[at + 1]
    chain.reshape([*shape[:at], merged, *shape[at + 2 :]])


def divide(chain: Chain, draw: Callable) -> None:
    shape = chain.shape
    even = [k for k, d in enumerate(shape) if isinstance(d, tirx.IntImm) and int(d) % 2 == 0]
    if even:
        at = draw(st.sampled_from(even))
        chain.reshape([*shape[:at], int(shape[at]) // 2, 2, *shape[at + 1 :]])


def regroup(chain: Chain, draw: Callable) -> None:
    shape = chain.shape
    chain.reshape([shape[k] for k in draw(st.permutations(range(len(shape))))])


def permute(chain: Chain, draw: Callable) -> None:
    axes = draw(st.permutations(range(len(chain.shape))))
    chain.add(R.permute_dims(chain.expr, axes), lambda a: a.transpose(axes))


def expand(chain: Chain, draw: Callable) -> None:
    at = draw(st.integers(0, len(chain.shape)))
    chain.add(R.expand_dims(chain.expr, at), lambda a: np.expand_dims(a, at))
    wide = [*chain.shape[:at], 2, *chain.shape[at + 1 :]]
    arrays = [np.broadcast_to(a, [*a.shape[:at], 2, *a.shape[at + 1 :]]) for a in chain.arrays]
    chain.expr, chain.arrays = chain.bb.emit(R.broadcast_to(chain.expr, wide)), arrays


def flip(chain: Chain, draw: Callable) -> None:
    at = draw(st.integers(0, len(chain.shape) - 1))
    chain.add(R.flip(chain.expr, at), lambda a: np.flip(a, at))


def repeat(chain: Chain, draw: Callable) -> None:
    at, times = draw(st.integers(0, len(chain.shape) - 1)), draw(st.integers(1, 3))
    chain.add(R.repeat(chain.expr, times, at), lambda a: np.repeat(a, times, at))


def tile(chain: Chain, draw: Callable) -> None:
    times = [draw(st.integers(1, 2)) for _ in chain.shape]
    chain.add(R.tile(chain.expr, times), lambda a: np.tile(a, times))


def cut(chain: Chain, draw: Callable) -> None:
    at = draw(st.integers(0, len(chain.shape) - 1))
    if not isinstance(chain.shape[at], tirx.IntImm):
        return
    n = int(chain.shape[at])
    begin, step = draw(st.integers(-n - 2, n + 1)), draw(st.sampled_from([1, 2, -1]))
    end = draw(st.integers(-n, n)) if step > 0 else -n - 1
    if len(range(n)[begin:end:step]) == 0:
        return  # TVM infers a negative length
    piece = (slice(None),) * at + (slice(begin, end, step),)
    chain.add(R.strided_slice(chain.expr, [at], [begin], [end], [step]), lambda a: a[piece])


def pick(chain: Chain, draw: Callable) -> None:
    at = draw(st.integers(0, len(chain.shape) - 1))
    if not isinstance(chain.shape[at], tirx.IntImm) or not int(chain.shape[at]):
        return
    begin = draw(st.integers(0, int(chain.shape[at]) - 1))
    places = np.arange(int(chain.shape[at]))[begin :: draw(st.integers(1, 2))]
    call = R.take(chain.expr, relax.const(places, "int64"), axis=at)
    chain.add(call, lambda a: np.take(a, places, at))


def join(chain: Chain, draw: Callable) -> None:
    """Slices of one element, each repeated, all of them repeated."""
    at = draw(st.integers(0, len(chain.shape) - 1))
    if not isinstance(chain.shape[at], tirx.IntImm) or not int(chain.shape[at]):
        return
    places = np.arange(int(chain.shape[at]))[:: draw(st.sampled_from([1, 2, -1]))]
    order = np.tile(np.repeat(places, draw(st.integers(1, 2))), draw(st.integers(1, 2))).tolist()
    parts = [chain.bb.emit(R.strided_slice(chain.expr, [at], [n], [n + 1])) for n in order]
    if is_stack := draw(st.booleans()):
        parts = [chain.bb.emit(R.squeeze(part, at)) for part in parts]
    whole = R.stack(parts, at) if is_stack else R.concat(parts, at)
    chain.add(whole, lambda a: np.take(a, order, at))


STEPS = (merge, divide, regroup, permute, expand, flip, repeat, tile, cut, pick, join)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_random_chains_read_what_numpy_reads(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(b, s, 4), (s, 6), (b * s, 4), (2, 3, 4), (b, 2, s, 2)]))
    x = relax.Var("x", relax.TensorType(list(shape), "float32"))
    arrays: list[np.ndarray] = []

    def build(bb: relax.BlockBuilder) -> relax.Expr:
        chain = Chain(bb, shape, x)
        for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=5)):
            if np.prod([max(a.size, 1) for a in chain.arrays]) < 1e12 and len(chain.shape) < 6:
                step(chain, data.draw)
        arrays.extend(chain.arrays)
        return chain.expr

    result, lookup = function_of([x], build)
    found = view_of(result, lookup)
    for sizes, expected in zip(Chain.SIZES, arrays, strict=True):
        if expected.size == 0:
            continue
        np.testing.assert_array_equal(read(found, x, sizes, expected.shape), expected)


def read(found: View, x: relax.Var, sizes: dict[str, int], shape: tuple[int, ...]) -> np.ndarray:
    """The elements of x = 0, 1, 2, … that the map reads."""
    assert found.source.same_as(x)
    values = dict(zip(found.axes, np.indices(shape), strict=True)) | {b: sizes["b"], s: sizes["s"]}
    at = tuple(np.broadcast_to(evaluate(index, values), shape) for index in found.indices)
    array = Chain.numbered(list(x.ty.shape), sizes)
    for index, size in zip(at, array.shape, strict=True):
        assert ((index >= 0) & (index < size)).all()
    return array[at]

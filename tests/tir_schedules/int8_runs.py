"""Build, run and compute products of INT8 and INT4 activations for the tests of this folder."""

import numpy as np
import tvm
from kernel_runs import target

from tir_schedules.int4_format.packing import unpack_parts


def scales(layout):
    """How many a row has: the fewest equal parts, of whole groups and at most 128 columns."""
    return next(
        count
        for count in range(1, layout.groups + 1)
        if layout.groups % count == 0
        and (count == layout.groups or layout.padded_k // count <= 128)
    )


def quantized(x, layout):
    """Codes (m, k) and scales (m, s) by the definition; a part of zeros has 2**-100 / 127, or 7."""
    largest = np.float32(7 if layout.spec.activation == "int4" else 127)
    padded = np.zeros((len(x), layout.padded_k), "float32")
    padded[:, : layout.k] = x
    parts = scales(layout)
    grouped = padded.reshape(len(x), parts, layout.padded_k // parts)
    scale = np.maximum(np.abs(grouped).max(-1), np.float32(2.0**-100)) / largest
    if layout.spec.activation_scale == "power-of-two":
        scale = np.exp2(np.ceil(np.log2(scale.astype("float64")))).astype("float32")
    codes = np.rint(grouped / scale[..., None]).astype("int64").reshape(padded.shape)
    return codes[:, : layout.k], scale


def as_words(codes, layout):
    """Codes (m, k) to the words (m, padded k / 4), or packed, that kernels read."""
    if layout.spec.activation == "int4" and layout.order == "fragments":
        return as_packed_words(codes, layout)
    padded = np.zeros((len(codes), layout.padded_k), "uint8")
    padded[:, : layout.k] = codes.astype("int8").view("uint8")
    ordered = padded.reshape(len(codes), layout.padded_k // 8, 4, 2).swapaxes(2, 3)
    words = np.ascontiguousarray(ordered).view("int32")
    return words.reshape(len(codes), layout.padded_k // 4)


def as_packed_words(codes, layout):
    """Byte c of word w has k = 64 (w / 8) + 8 (w % 8 / 2) + 2 c + w % 2, its high half k + 32."""
    padded = np.zeros((len(codes), -(-layout.padded_k // 64) * 64), "int64")
    padded[:, : layout.k] = codes & 15
    word, byte = np.indices((padded.shape[1] // 8, 4))
    low = word // 8 * 64 + word % 8 // 2 * 8 + 2 * byte + word % 2
    packed = padded[:, low] | padded[:, low + 32] << 4
    words = np.ascontiguousarray(packed.astype("uint8")).view("int32")
    return words.reshape(len(codes), len(word))


def group_sums(codes, layout):
    padded = np.zeros((len(codes), layout.padded_k), "int64")
    padded[:, : layout.k] = codes
    return padded.reshape(len(codes), layout.groups, layout.group_size).sum(-1)


def random_weight(rng, layout):
    codes, scale, *zero = layout.shapes
    return [
        rng.integers(0, 1 << 32, codes, dtype=np.uint32),
        rng.normal(size=scale).astype(layout.spec.scale_dtype),
        *(rng.integers(0, 1 << 32, shape, dtype=np.uint32) for shape in zero),
    ]


def product(codes, scale, parts, layout):
    """Exact integer sums of each group, then float64."""
    weight, steps, zero = unpack_parts(parts, layout)
    zero = np.full((layout.n, layout.groups), 8) if zero is None else zero.astype("int64")
    groups = weight.astype("int64").reshape(layout.n, layout.groups, layout.group_size)
    shifted = groups - zero[:, :, None]
    x = np.zeros((len(codes), layout.padded_k), "int64")
    x[:, : layout.k] = codes
    sums = np.einsum("ngk,mgk->mng", shifted, x.reshape(len(x), *shifted.shape[1:]))
    steps = steps.astype("float64")
    x_steps = np.repeat(scale.astype("float64"), layout.groups // scale.shape[1], axis=1)
    terms = sums * steps * x_steps[:, None, :]
    return terms.sum(-1), np.abs(terms).sum(-1)


def build(func, rule, name):
    scheduled = rule.apply(func, target(name), False) if rule else None
    with target(name):
        mod = scheduled.mod if rule else tvm.IRModule({"main": func})
        return tvm.compile(mod, target=target(name))["main"]


def run(kernel, *inputs, outputs):
    made = [tvm.runtime.tensor(np.full(shape, 77, dtype)) for shape, dtype in outputs]
    kernel(*(tvm.runtime.tensor(array) for array in inputs), *made)
    return [tensor.numpy() for tensor in made]


def run_product(kernel, codes, scale, parts, layout, dtype="float32"):
    x = as_words(codes, layout), scale, group_sums(codes, layout).astype("int32")
    (y,) = run(kernel, *x, *parts, outputs=[((len(codes), layout.n), dtype)])
    return y

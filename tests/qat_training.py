"""Small models in Relax, and a training loop over `differentiate` and `build`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.relax import op as R
from tvm.relax.training import AppendLoss
from tvm.relax.training.loss import CrossEntropyLoss

import sits_tvm

TARGET = "llvm -mcpu=native"
Params = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """`mod` has main(x, *weights) -> logits (rows, classes), and weights have these shapes."""

    mod: IRModule
    shapes: dict[str, tuple[int, ...]]
    rows: int
    classes: int

    def initial(self, rng: np.random.Generator) -> Params:
        """Matrices N(0, 1 / inputs), vectors of ones (gains) or zeros (biases)."""
        values = {}
        for name, shape in self.shapes.items():
            if len(shape) == 2:
                value = rng.standard_normal(shape) / np.sqrt(shape[1])
            else:
                value = np.ones(shape) if name.endswith("gain") else np.zeros(shape)
            values[name] = value.astype("float32")
        return values


class _Builder:
    """Emits ops; `linear` multiplies by a named weight (n, k)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.bb = relax.BlockBuilder()
        types = {name: relax.TensorType(shape, "float32") for name, shape in shapes.items()}
        self.weights = {name: relax.Var(name, ty) for name, ty in types.items()}

    def __call__(self, value: relax.Expr) -> relax.Var:
        return self.bb.emit(value)

    def linear(self, x: relax.Var, name: str) -> relax.Var:
        return self(R.matmul(x, self(R.permute_dims(self.weights[name]))))

    def norm(self, x: relax.Var, name: str) -> relax.Var:
        return self(R.nn.rms_norm(x, self.weights[name], axes=[-1]))

    def module(self, x: relax.Var, make: Callable[[], relax.Var]) -> IRModule:
        arguments = [x, *self.weights.values()]
        with self.bb.function("main", arguments, attrs={"num_input": 1}):
            with self.bb.dataflow():
                out = self.bb.emit_output(make())
            self.bb.emit_func_output(out)
        return self.bb.get()


def mlp(widths: tuple[int, ...], rows: int) -> Model:
    """Linear layers of these widths with a ReLU between them, x (rows, widths[0])."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (k, n) in enumerate(pairwise(widths)):
        shapes |= {f"layer{i}.weight": (n, k), f"layer{i}.bias": (n,)}
    emit = _Builder(shapes)
    x = relax.Var("x", relax.TensorType((rows, widths[0]), "float32"))

    def forward() -> relax.Var:
        h = x
        for i in range(len(widths) - 1):
            h = emit(R.nn.relu(h)) if i else h
            h = emit(R.add(emit.linear(h, f"layer{i}.weight"), emit.weights[f"layer{i}.bias"]))
        return h

    return Model(emit.module(x, forward), shapes, rows, widths[-1])


def transformer(vocabulary: int, width: int, layers: int, heads: int, length: int, batch: int):
    """A causal language model, ids (batch, length) int64 -> logits (batch · length, vocabulary)."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocabulary, width),
        "positions": (length, width),
    }
    for i in range(layers):
        shapes |= {
            f"block{i}.attention.gain": (width,),
            **{f"block{i}.attention.{name}": (width, width) for name in ("q", "k", "v", "out")},
            f"block{i}.mlp.gain": (width,),
            f"block{i}.mlp.up": (4 * width, width),
            f"block{i}.mlp.down": (width, 4 * width),
        }
    shapes |= {"final.gain": (width,), "head": (vocabulary, width)}
    emit = _Builder(shapes)
    ids = relax.Var("ids", relax.TensorType((batch, length), "int64"))
    mask = np.triu(np.full((length, length), -1e9, "float32"), 1)
    size = width // heads

    def split(x: relax.Var) -> relax.Var:
        x = emit(R.reshape(x, (batch, length, heads, size)))
        return emit(R.permute_dims(x, [0, 2, 1, 3]))

    def attention(x: relax.Var, name: str) -> relax.Var:
        q, k, v = (split(emit.linear(x, f"{name}.{which}")) for which in "qkv")
        keys = emit(R.permute_dims(k, [0, 1, 3, 2]))
        scores = emit(R.multiply(emit(R.matmul(q, keys)), relax.const(size**-0.5, "float32")))
        weights = emit(R.nn.softmax(emit(R.add(scores, relax.const(mask)))))
        mixed = emit(R.permute_dims(emit(R.matmul(weights, v)), [0, 2, 1, 3]))
        return emit.linear(emit(R.reshape(mixed, (batch * length, width))), f"{name}.out")

    def forward() -> relax.Var:
        flat = emit(R.reshape(ids, (batch * length,)))
        x = emit(
            R.reshape(emit(R.take(emit.weights["embedding"], flat, axis=0)), (batch, length, width))
        )
        x = emit(R.reshape(emit(R.add(x, emit.weights["positions"])), (batch * length, width)))
        for i in range(layers):
            h = emit.norm(x, f"block{i}.attention.gain")
            x = emit(R.add(x, attention(h, f"block{i}.attention")))
            h = emit.linear(emit.norm(x, f"block{i}.mlp.gain"), f"block{i}.mlp.up")
            x = emit(R.add(x, emit.linear(emit(R.nn.gelu(h)), f"block{i}.mlp.down")))
        return emit.linear(emit.norm(x, "final.gain"), "head")

    return Model(emit.module(ids, forward), shapes, batch * length, vocabulary)


def gradient_function(
    mod: IRModule, rows: int, classes: int, names: Iterable[str]
) -> Callable[[np.ndarray, np.ndarray, Params], tuple[float, list[np.ndarray]]]:
    """(x, labels, params) -> (mean cross entropy, its gradients of `names`), compiled."""
    logits = relax.TensorType((rows, classes), "float32")
    labels = relax.TensorType((rows,), "int64")
    loss = CrossEntropyLoss(reduction="mean")(logits, labels)
    adjoint = sits_tvm.differentiate(AppendLoss("main", loss)(mod), "main_loss", list(names))
    built = sits_tvm.build(adjoint, TARGET)
    run = relax.VirtualMachine(built, tvm.cpu())["main_loss_adjoint"]
    order = [argument.name for argument in mod["main"].params[1:]]

    def step(x: np.ndarray, labels: np.ndarray, params: Params):
        value, gradients = run(x, *(params[name] for name in order), labels)
        return float(value.numpy()), [gradient.numpy() for gradient in gradients]

    return step


def adam(
    params: Params,
    step: Callable,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    rates: Callable[[float, str], float],
    total: int,
) -> list[float]:
    """Train `params` in place, `total` steps; the losses. `rates(progress, name)` are the rates."""
    names = list(params)
    first = {name: np.zeros_like(params[name]) for name in names}
    second = {name: np.zeros_like(params[name]) for name in names}
    losses = []
    for t, (x, labels) in zip(range(1, total + 1), batches, strict=False):
        loss, gradients = step(x, labels, params)
        losses.append(loss)
        for name, gradient in zip(names, gradients, strict=True):
            first[name] += 0.1 * (gradient - first[name])
            second[name] += 0.01 * (gradient**2 - second[name])
            mean, square = first[name] / (1 - 0.9**t), second[name] / (1 - 0.99**t)
            rate = rates((t - 1) / total, name)
            params[name] -= (rate * mean / (np.sqrt(square) + 1e-8)).astype("float32")
    return losses


def copied(params: Mapping[str, object]) -> Params:
    """NumPy arrays of their own, to be trained in place."""
    arrays = {n: v.numpy() if hasattr(v, "numpy") else v for n, v in params.items()}
    return {name: np.array(array) for name, array in arrays.items()}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's 1797 digits, shuffled: float32 pixels (n, 64) in -1…1, int64 labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 8 - 1).astype("float32"), data.target[order].astype("int64")


def logits_of(mod: IRModule, params: Mapping[str, object], config=None) -> Callable:
    """x -> logits of the built forward function."""
    built = sits_tvm.build(mod, TARGET, params=params, config=config)
    run = relax.VirtualMachine(built, tvm.cpu())["main"]
    return lambda x: run(x, *built.param_list).numpy()


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    shifted = logits.astype("float64") - logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(-1))
    return float((log_sum - shifted[np.arange(len(labels)), labels]).mean())

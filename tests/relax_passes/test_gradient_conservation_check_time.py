"""The time of the static walk is linear in what it walks."""

import time

from tvm import IRModule, relax
from tvm.relax import op as O
from tvm.script import relax as R

from relax_passes.gradient_conservation_check import gradient_conservation_check


def layers(count, width=16):
    """A residual network of `count` layers, 12 bindings and 4 parameters each."""
    bb = relax.BlockBuilder()
    tensor = lambda *shape: relax.TensorType(shape, "float32")  # noqa: E731
    x = relax.Var("x", tensor(4, width))
    params = [
        relax.Var(f"{name}{i}", tensor(*shape))
        for i in range(count)
        for name, shape in {
            "w": (width, width), "s": (width,), "v": (width, width), "t": (width,)
        }.items()
    ]  # fmt: skip
    with bb.function("main", [x, *params], {"num_input": 1}):
        with bb.dataflow():
            h = x
            for i in range(count):
                w, s, v, t = params[4 * i : 4 * i + 4]
                for weight, scale in ((w, s), (v, t)):
                    quantized = bb.emit(R.sits.fake_quantize(weight, scale, axis=0))
                    y = bb.emit(O.matmul(h, bb.emit(O.permute_dims(quantized))))
                    h = bb.emit(O.add(h, bb.emit(O.nn.silu(y))))
                    h = bb.emit(O.nn.relu(h))
            loss = bb.emit_output(O.sum(h))
        bb.emit_func_output(loss)
    mod = bb.get()
    return relax.transform.Gradient("main", list(mod["main"].params[1:]))(mod)


def seconds(mod: IRModule) -> float:
    start = time.perf_counter()
    assert gradient_conservation_check(mod) == []
    return time.perf_counter() - start


def test_time_is_linear_in_the_number_of_bindings():
    small, large = layers(20), layers(80)
    bindings = [len(m["main_adjoint"].body.blocks[0].bindings) for m in (small, large)]
    assert bindings[1] > 4000
    fast = min(seconds(small) for _ in range(3))
    slow = min(seconds(large) for _ in range(3))
    print(f"\n{bindings[0]} bindings: {fast:.2f} s; {bindings[1]} bindings: {slow:.2f} s")
    assert slow < 10
    assert slow < 8 * fast


def all_cut(count: int) -> IRModule:
    """x + Σ floor(w) and its adjoint, in which the gradient of every w is zero."""
    ty = relax.TensorType((), "float32")
    params = [relax.Var(f"w{i}", ty) for i in range(count)]
    functions = {}
    for name in ("main", "main_adjoint"):
        bb, x, *ws = relax.BlockBuilder(), relax.Var("x", ty), *params
        args = [relax.Var(p.name, ty) for p in (x, *ws)]
        with bb.function(name, args):
            with bb.dataflow():
                total = args[0]
                for w in args[1:]:
                    total = bb.emit(O.add(total, bb.emit(O.floor(w))))
                result = loss = bb.emit(O.negative(total), "loss")
                if name == "main_adjoint":
                    seed = bb.emit(O.ones((), "float32"), "loss_adjoint")
                    zeros = [bb.emit(O.zeros((), "float32")) for _ in ws]
                    gradients = relax.Tuple([bb.emit(O.negative(seed)), *zeros])
                    result = relax.Tuple([loss, gradients])
                out = bb.emit_output(result)
            bb.emit_func_output(out)
        functions[name] = bb.get()[name]
    return IRModule(functions)


def test_time_is_linear_in_the_number_of_cut_parameters():
    def seconds(mod):
        start = time.perf_counter()
        codes = [(d.code, d.binding) for d in gradient_conservation_check(mod)]
        assert {code for code, _ in codes} == {"gradient-cut"}
        assert len(set(codes)) == len(mod["main"].params) - 1  # each at its own floor
        return time.perf_counter() - start

    small, large = all_cut(100), all_cut(800)
    fast, slow = (min(seconds(mod) for _ in range(2)) for mod in (small, large))
    print(f"\n100 parameters: {fast:.2f} s; 800 parameters: {slow:.2f} s")
    assert slow < 16 * fast

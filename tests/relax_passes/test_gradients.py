"""Gradients and Hessian-vector products of every op, in float64, against torch autograd."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as R

from sits_tvm import differentiate

torch = pytest.importorskip("torch")

import adjoint_ops  # noqa: E402
from gradient_cases import CASES  # noqa: E402

from sits_tvm.gradient_check import twin  # noqa: E402


def module(case):
    """main(*xs) = Σ sin(y²) of the op's result y, which makes every derivative matter."""
    bb = relax.BlockBuilder()
    xs = [
        relax.Var(f"x{i}", relax.TensorType(list(s), "float32")) for i, s in enumerate(case.shapes)
    ]
    with bb.function("main", xs):
        with bb.dataflow():
            y = bb.emit(case.ours(bb, *xs))
            loss = bb.emit_output(R.sum(bb.emit(R.sin(bb.emit(R.multiply(y, y))))))
        bb.emit_func_output(loss)
    return bb.get()


def hessian_product(mod):
    """The adjoint of hv(*xs, *vs) = Σ <gradient, v>, which has H v as its first gradients."""
    main = mod["main_adjoint"]
    shapes = {v: tvm.tirx.Var(v.name, "int64") for v in relax.analysis.defined_symbolic_vars(main)}
    params = (main.bind_symbolic_vars(shapes) if shapes else main).params
    xs, vs = ([relax.Var(f"{name}{i}", p.ty) for i, p in enumerate(params)] for name in "xv")
    bb = relax.BlockBuilder(mod)
    with bb.function("hv", [*xs, *vs]):
        with bb.dataflow():
            call = bb.emit(relax.Call(mod.get_global_var("main_adjoint"), xs))
            total = relax.const(0, "float32")
            for i, v in enumerate(vs):
                product = bb.emit(R.multiply(bb.emit(bb.emit(call[1])[i]), v))
                total = bb.emit(R.add(total, bb.emit(R.sum(product))))
            loss = bb.emit_output(total)
        bb.emit_func_output(loss)
    return differentiate(bb.get(), "hv", [x.name for x in xs])


def torch_loss(case, tensors):
    y = case.theirs(*tensors)
    return (y * y).sin().sum()


def torch_derivatives(case, directions):
    xs = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in case.arrays]
    options = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(torch_loss(case, xs), xs, create_graph=True, **options)
    along = sum((g * torch.tensor(v)).sum() for g, v in zip(first, directions, strict=True))
    if not along.requires_grad:
        return first, [torch.zeros_like(x) for x in xs]
    return first, torch.autograd.grad(along, xs, **options)


def evaluate(mod, name, arrays):
    """The gradients that the function returns, in float64."""
    _, gradients = (
        twin.Twin(mod, name).run([torch.tensor(a, dtype=torch.float64) for a in arrays]).outputs
    )
    return gradients


def assert_equal(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        ours, theirs = ours.detach().numpy(), theirs.detach().numpy()
        assert ours.shape == theirs.shape
        assert np.linalg.norm(ours - theirs) <= 1e-7 * np.linalg.norm(theirs)


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    for name, rule in adjoint_ops.RULES.items():
        monkeypatch.setitem(twin.RULES, name, rule)


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_order_agree_with_torch(name, rng):
    case = CASES[name]
    directions = [rng.standard_normal(a.shape) for a in case.arrays]
    first, second = torch_derivatives(case, directions)
    mod = differentiate(module(case))
    assert_equal(evaluate(mod, "main_adjoint", case.arrays), first)
    twice = hessian_product(mod)
    assert_equal(evaluate(twice, "hv_adjoint", [*case.arrays, *directions]), second)


@pytest.mark.parametrize("reduce", [R.max, R.min])
def test_an_infinite_gradient_of_an_extremum_reaches_no_other_element(reduce):
    bb = relax.BlockBuilder()
    x, c = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in [("x", (2, 3)), ("c", (2,))])
    with bb.function("main", [x, c]):
        with bb.dataflow():
            loss = bb.emit_output(R.sum(bb.emit(R.multiply(bb.emit(reduce(x, -1)), c))))
        bb.emit_func_output(loss)
    vm = relax.VirtualMachine(
        relax.build(differentiate(bb.get(), "main", ["x"]), "llvm"), tvm.cpu()
    )
    values = np.array([[1, 2, 3], [6, 5, 4]], "float32")
    got = vm["main_adjoint"](values, np.array([np.inf, 2], "float32"))[1][0].numpy()
    hit = values == (values.max(1, keepdims=True) if reduce is R.max else values.min(1)[:, None])
    np.testing.assert_array_equal(got, np.where(hit, [[np.inf], [2]], 0))

"""from_torch: modules of many ops, each compared with torch."""

import numpy as np
import pytest
from torch_runs import Calls, Dim, agrees, check_all, run

from sits_tvm.frontends.torch import from_torch

torch = pytest.importorskip("torch")


def test_integers_follow_torch():
    check_all(
        {
            "mul float": lambda i, u, b: i * 0.5,
            "div": lambda i, u, b: i / 2,
            "div tensor": lambda i, u, b: i / (u + 1),
            "floor div": lambda i, u, b: i // 3,
            "div trunc": lambda i, u, b: torch.div(i, 3, rounding_mode="trunc"),
            "div floor": lambda i, u, b: torch.div(i, -3, rounding_mode="floor"),
            "remainder": lambda i, u, b: i % 3,
            "fmod": lambda i, u, b: torch.fmod(i, 3),
            "rsub": lambda i, u, b: 5 - i,
            "alpha": lambda i, u, b: torch.sub(i, u, alpha=2),
            "square": lambda i, u, b: i**2,
            "fifth power": lambda i, u, b: i**5,
            "power 0": lambda i, u, b: i**0,
            "clamp float": lambda i, u, b: i.clamp(min=0.5),
            "where": lambda i, u, b: torch.where(b, i, 0.5),
            "bool mul": lambda i, u, b: b * (i > 0),
            "bool add": lambda i, u, b: b + (i > 0),
            "shift": lambda i, u, b: i >> 1,
            "any": lambda i, u, b: i.any(),
            "all": lambda i, u, b: b.all(0),
            "amax bool": lambda i, u, b: b.amax(0),
            "matmul": lambda i, u, b: i[:, None] @ i[None],
        },
        torch.arange(-4, 4),
        torch.tensor([200, 100, 50, 0, 1, 2, 3, 255], dtype=torch.uint8),
        torch.tensor([True, False] * 4),
    )


def test_sums_of_narrow_types_do_not_wrap():
    axes = {"cumsum": (0,), "cumprod": (0,), "sum": (), "prod": ()}
    check_all(
        {
            f"{op} {position}": lambda *xs, op=op, position=position: getattr(xs[position], op)(
                *axes[op]
            )
            for position in range(3)
            for op in axes
        }
        | {"dtype": lambda b, u, i: u.cumsum(0, dtype=torch.float32)},
        torch.tensor([True, True, False, True]),
        torch.tensor([200, 100, 50, 3], dtype=torch.uint8),
        torch.full((4,), 2**30, dtype=torch.int32),
    )


def put(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def test_indices_count_from_the_end():
    every = slice(None)
    check_all(
        {
            "last": lambda x, i, j: x[:, -1],
            "constant": lambda x, i, j: x[:, [-1, 0]],
            "tensor": lambda x, i, j: x[:, i],
            "adjacent": lambda x, i, j: x[:, i, j],
            "apart": lambda x, i, j: x[i, :, j],
            "outer": lambda x, i, j: x[i[:, None], j],
            "middle": lambda x, i, j: x[:, :, i[:, None], j - j],
            "take": lambda x, i, j: torch.take(x, i),
            "slice": lambda x, i, j: x[:, -2:, 1:-1],
            "step": lambda x, i, j: x[..., 1::2],
            "put": lambda x, i, j: put(x, i, 7.0),
            "put middle": lambda x, i, j: put(x, (every, i, j), x[:, 0, 0:1]),
            "add up": lambda x, i, j: torch.index_put(x, [i - i], x[0], accumulate=True),
        },
        torch.randn(3, 4, 5, 6),
        torch.tensor([0, -1, 2]),
        torch.tensor([-2, 1, -3]),
    )


def test_matrix_products_keep_their_dtype():
    x = torch.randn(2, 3, 4).half()
    check_half = {
        "linear": lambda x: torch.nn.functional.linear(x, x[0]),
        "matmul": lambda x: x @ x.transpose(1, 2),
        "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
        "addmm": lambda x: torch.addmm(x[0, :, :3], x[0], x[1].t(), alpha=0.5, beta=2),
        "addmm without x": lambda x: torch.addmm(
            x[0, :, :3] * float("nan"), x[0], x[1].t(), beta=0
        ),
        "baddbmm": lambda x: torch.baddbmm(x[:, :, :3], x, x.transpose(1, 2), alpha=2),
        "mv": lambda x: x[0] @ x[0, 0],
        "mm": lambda x: x[0] @ x[0].t(),
    }
    module = Calls(lambda x: tuple(f(x) for f in check_half.values()))
    mod, params = from_torch(module, (x,))
    for name, got, want in zip(check_half, run(mod, params, x), module(x), strict=True):
        assert got.dtype == np.float16, name
        np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3, err_msg=name)


def test_attention_keeps_every_keyword():
    sdpa = torch.nn.functional.scaled_dot_product_attention
    visible = torch.rand(6, 6) > 0.5
    visible[2] = False
    check_all(
        {
            "plain": lambda q, k, m: sdpa(q, q, q),
            "scale": lambda q, k, m: sdpa(q, q, q, scale=1.0),
            "causal": lambda q, k, m: sdpa(q, q, q, is_causal=True),
            "causal, more keys": lambda q, k, m: sdpa(q[:, :, :4], q, q, is_causal=True),
            "bool mask, empty row": lambda q, k, m: sdpa(q, q, q, m),
            "float mask": lambda q, k, m: sdpa(q, q, q, m.float()[None], scale=0.3),
            "grouped": lambda q, k, m: sdpa(q, k, k, enable_gqa=True, scale=2.0),
            "rank 3": lambda q, k, m: sdpa(q[0], q[1], q[0], m),
            "rank 2": lambda q, k, m: sdpa(q[0, 0], q[1, 1], q[0, 2]),
        },
        torch.randn(2, 4, 6, 8),
        torch.randn(2, 2, 6, 8),
        visible,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :1] + x,
        lambda x: x[:, -1:] + x,
        lambda x: (x[:, 1:] - x[:, :-1]).sum(1),
        lambda x: x[:, -3:] * 2,
        lambda x: x[:, ::2],
        lambda x: x[:, -2],
        lambda x: x.reshape(-1, 2, x.shape[1]).flatten(1),
        lambda x: x / x.shape[1] + x.shape[1] // 2,
        lambda x: torch.cat([x, x[:, :2]], 1)[:, 1:-1],
        lambda x: torch.arange(x.shape[1])[:, None] + x[:1],
    ],
)
def test_symbolic_dimension(function):
    shapes = (({1: Dim("s", min=4, max=64)},),)
    runs = [(torch.randn(4, n),) for n in (4, 9, 64)]
    agrees(Calls(function), (torch.randn(4, 6),), *runs, dynamic_shapes=shapes)

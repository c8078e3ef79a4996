"""Gradients of elementwise ops and of reductions, and their torch equivalents."""

import numpy as np
import torch
from gradient_inputs import INSIDE, POSITIVE, ROWS, TIED, Cases, N, X, Y, chain
from tvm import relax
from tvm.relax import op as R

F = torch.nn.functional
CASES = Cases()
case = CASES.add

for _name, _ours, _theirs, _other, _shape in [
    ("add", R.add, torch.add, X[0], [8]),
    ("subtract", R.subtract, torch.sub, X[:, :1].copy(), [N, 1]),
    ("multiply", R.multiply, torch.mul, X[0], [8]),
    ("divide", R.divide, torch.div, POSITIVE[0], [8]),
    ("maximum_tied", R.maximum, torch.maximum, np.round(Y), ROWS),
    ("minimum_tied", R.minimum, torch.minimum, np.round(Y), ROWS),
]:
    case(_name, chain(_ours), _theirs, TIED, _other, shapes=[ROWS, _shape])

case("power", chain(R.power), torch.pow, POSITIVE, X[0], shapes=[ROWS, [8]])
for _e in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0):
    case(
        f"power_{_e}",
        lambda bb, x, e=_e: R.power(x, relax.const(e, "float32")),
        lambda x, e=_e: x**e,
        POSITIVE if _e in (0.5, -1.0) else TIED,
        shapes=[ROWS],
    )
case(
    "where_broadcast",
    lambda bb, x, y: R.where(bb.emit(R.greater(x, relax.const(0, "float32"))), x, y),
    lambda x, y: torch.where(x > 0, x, y),
    X,
    Y[0],
    shapes=[ROWS, [8]],
)
for _name, _ours, _theirs, _x in [
    ("abs_at_zero", R.abs, torch.abs, np.where(X > 0.5, X, 0).astype("float32")),
    ("rsqrt", R.rsqrt, torch.rsqrt, POSITIVE),
    ("square", R.square, torch.square, X),
    ("erf", R.erf, torch.erf, X),
    ("tan", R.tan, torch.tan, INSIDE),
    ("asin", R.asin, torch.asin, INSIDE),
    ("acos", R.acos, torch.acos, INSIDE),
    ("atan", R.atan, torch.atan, X),
    ("asinh", R.asinh, torch.asinh, X),
    ("acosh", R.acosh, torch.acosh, POSITIVE + 1),
    ("atanh", R.atanh, torch.atanh, INSIDE),
    ("exp", R.exp, torch.exp, X),
    ("log", R.log, torch.log, POSITIVE),
    ("sqrt", R.sqrt, torch.sqrt, POSITIVE),
    ("sigmoid", R.sigmoid, torch.sigmoid, X),
    ("tanh", R.tanh, torch.tanh, X),
    ("cos", R.cos, torch.cos, X),
    ("negative", R.negative, torch.neg, X),
    ("relu_at_zero", R.nn.relu, torch.relu, TIED),
    ("leakyrelu", lambda x: R.nn.leakyrelu(x, 0.1), lambda x: F.leaky_relu(x, 0.1), TIED),
    ("softplus", lambda x: R.nn.softplus(x, 2.0, 1.0), lambda x: F.softplus(x, 2.0, 1.0), X),
    ("silu", R.nn.silu, F.silu, X),
    ("gelu", R.nn.gelu, F.gelu, X * 2),
    ("gelu_tanh", R.nn.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), X * 2),
    ("softmax", lambda x: R.nn.softmax(x, -1), lambda x: x.softmax(-1), X),
    ("softmax_rows", lambda x: R.nn.softmax(x, 0), lambda x: x.softmax(0), X),
    ("log_softmax", lambda x: R.nn.log_softmax(x, -1), lambda x: x.log_softmax(-1), X),
    ("widening", lambda x: R.astype(x, "float64"), lambda x: x.double(), X),
]:
    case(_name, chain(_ours), _theirs, _x, shapes=[ROWS])

for _axis, _dim in [(None, (0, 1)), (0, 0), (-1, -1), ([0, 1], (0, 1))]:
    for _keep in (False, True):
        for _name, _theirs in [
            ("sum", torch.sum),
            ("mean", torch.mean),
            ("max", torch.amax),
            ("min", torch.amin),
            ("variance", lambda x, **o: torch.var(x, correction=0, **o)),
            ("std", lambda x, **o: torch.std(x, correction=0, **o)),
        ]:
            case(
                f"{_name}_{_axis}_{_keep}",
                lambda bb, x, f=_name, a=_axis, k=_keep: getattr(R, f)(x, a, k),
                lambda x, f=_theirs, d=_dim, k=_keep: f(x, dim=d, keepdim=k),
                TIED if _name in ("max", "min") else X,
                shapes=[ROWS],
            )

case(
    "full",
    lambda bb, v, x: R.multiply(bb.emit(R.full((N, 8), v)), x),
    lambda v, x: v.expand(3, 8) * x,
    np.float32(0.3),
    X,
    shapes=[[], ROWS],
)
case(
    "full_like",
    lambda bb, v, x: R.multiply(bb.emit(R.full_like(x, v)), x),
    lambda v, x: v.expand(3, 8) * x,
    np.float32(0.3),
    X,
    shapes=[[], ROWS],
)

"""Gradients of 2-D convolution and its transpose, each by the other, so that any order works;
and what TVM's gradient of pooling cannot do.

TVM's rule for conv2d emits a conv2d in another layout, which it then differentiates as if that
were NCHW, and conv2d_transpose has none. Ours are for NCHW, one group; else TVM's remain.
"""

from __future__ import annotations

from tvm import relax
from tvm.relax import BlockBuilder as Builder
from tvm.relax import Expr
from tvm.relax import op as R
from tvm.relax.op._op_gradient import conv2d_grad, max_pool2d_grad

from ._rules import dims, gradient


@gradient("nn.conv2d")
def _conv2d(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """dx = transposed convolution of g by w; dw = convolution of x by g over the batch."""
    attrs = call.attrs
    if not _is_plain(call, "OIHW"):
        return list(conv2d_grad(var, call, g, bb))
    x, w = call.args
    dx = R.nn.conv2d_transpose(
        g, w, attrs.strides, attrs.padding, _missing(x, g, w, call), attrs.dilation,
        data_layout="NCHW", kernel_layout="IOHW",
    )  # fmt: skip
    return [dx, _weight_gradient(bb, x, g, w, call)]


@gradient("nn.conv2d_transpose")
def _conv2d_transpose(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """⟨transpose(x), g⟩ = ⟨x, conv2d(g)⟩, so dx = conv2d(g) and dw is that of conv2d(g)."""
    attrs = call.attrs
    if not _is_plain(call, "IOHW"):
        raise ValueError(
            f"conv2d_transpose of {attrs.groups} groups, layouts {attrs.data_layout} and "
            f"{attrs.kernel_layout}, has no gradient; one group of NCHW and IOHW has"
        )
    x, w = call.args
    dx = R.nn.conv2d(g, w, attrs.strides, attrs.padding, attrs.dilation)
    return [dx, _weight_gradient(bb, g, x, w, call)]


@gradient("nn.max_pool2d")
def _max_pool2d(var: relax.Var, call: relax.Call, g: Expr, bb: Builder) -> list[Expr]:
    """TVM's, whose kernel knows no dilation."""
    if any(int(d) != 1 for d in call.attrs.dilation):
        raise ValueError(f"max_pool2d of dilation {list(call.attrs.dilation)}; only 1 has one")
    return list(max_pool2d_grad(var, call, g, bb))


def _is_plain(call: relax.Call, kernel_layout: str) -> bool:
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or attrs.data_layout)
    return int(attrs.groups) == 1 and layouts == ("NCHW", kernel_layout, "NCHW")


def _weight_gradient(bb: Builder, x: Expr, g: Expr, w: Expr, call: relax.Call) -> Expr:
    """Σ over batch and positions of x · g: a convolution with strides and dilation exchanged."""
    attrs = call.attrs
    swapped = [bb.emit(R.permute_dims(part, [1, 0, 2, 3])) for part in (x, g)]
    full = bb.emit(R.nn.conv2d(*swapped, attrs.dilation, attrs.padding, attrs.strides))
    full = bb.emit(R.permute_dims(full, [1, 0, 2, 3]))
    height, width = dims(w)[2:]
    return bb.emit(R.strided_slice(full, [2, 3], [0, 0], [height, width]))


def _missing(x: Expr, g: Expr, w: Expr, call: relax.Call) -> list[int]:
    """Rows and columns of x at the end that the strides of the convolution skip."""
    top, left, bottom, right = (int(p) for p in call.attrs.padding)
    padding = (top + bottom, left + right)
    return [
        int(dims(x)[2 + i])
        + padding[i]
        - (int(dims(g)[2 + i]) - 1) * int(call.attrs.strides[i])
        - (int(dims(w)[2 + i]) - 1) * int(call.attrs.dilation[i])
        - 1
        for i in range(2)
    ]

"""One small test for each reported fault of import that this package fixes, through `build`."""

import numpy as np
import pytest
import tvm
from torch_runs import Calls
from tvm import relax

import sits_tvm

torch = pytest.importorskip("torch")


def run(mod, params, *inputs):
    ex = sits_tvm.build(mod, "llvm", params=params)
    vm = relax.VirtualMachine(ex, tvm.cpu())
    return vm["main"](*[tvm.runtime.tensor(x) for x in inputs], *ex.param_list).numpy()


def compare(module, example, inputs=None, dynamic_shapes=None, tolerance=1e-5):
    inputs = inputs or example
    mod, params = sits_tvm.from_torch(module.eval(), example, dynamic_shapes=dynamic_shapes)
    got, want = run(mod, params, *[x.numpy() for x in inputs]), module(*inputs).detach().numpy()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bias", [True, False])
def test_float16_linear_stays_float16(bias):
    """Upstream computes in float32, and then cannot add a float16 bias."""
    compare(torch.nn.Linear(8, 4, bias=bias).half(), (torch.randn(2, 8).half(),), tolerance=2e-3)


def test_last_token():
    """Upstream reads outside the tensor for x[:, -1]."""
    compare(Calls(lambda x: x[:, -1]), (torch.randn(3, 5, 4),))


@pytest.mark.parametrize(
    "x", [torch.tensor([True, True, False]), torch.tensor([200, 100, 50], dtype=torch.uint8)]
)
def test_narrow_cumsum(x):
    """Upstream fails in LLVM for bool, and wraps uint8 around."""
    compare(Calls(lambda x: torch.cumsum(x, 0)), (x,))


def test_llama_without_a_mask():
    """transformers detects packed sequences by the cumsum of a bool."""
    tf = pytest.importorskip("transformers")
    config = tf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = tf.LlamaForCausalLM(config)
    logits = Calls(lambda ids: model(input_ids=ids, use_cache=False).logits)
    logits.model = model
    compare(logits, (torch.tensor([[1, 2, 3, 4, 5, 6]]),))


def test_bert_of_any_length():
    """Upstream leaves position buffers sliced to min(s, 512), and sums of unknown shape."""
    tf = pytest.importorskip("transformers")
    config = tf.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=64,
    )
    model = tf.BertModel(config)
    module = Calls(lambda i, m: model(input_ids=i, attention_mask=m).last_hidden_state)
    module.model = model
    length = torch.export.Dim("s", min=2, max=32)
    one, ids = torch.ones(1, 6, dtype=torch.int64), torch.arange(9)[None] + 1
    shapes = (({1: length}, {1: length}),)
    compare(module, (one, one.clone()), (ids, torch.ones_like(ids)), shapes)


def test_slice_of_a_symbolic_axis_broadcasts():
    """Upstream types x[:, :1] as min(1, s), and x[:, :1] + x as unknown."""
    shapes = (({1: torch.export.Dim("s", min=2, max=64)},),)
    function = Calls(lambda x: x[:, :1] + x)
    compare(function, (torch.randn(1, 6),), (torch.randn(1, 9),), shapes)


def test_attention_uses_its_scale():
    """Upstream drops scale= where attention is kept whole."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    inputs = tuple(torch.randn(1, 2, 6, 8) for _ in range(3))
    compare(Calls(lambda q, k, v: sdpa(q, k, v, scale=1.0)), inputs)


def test_take_of_a_negative_constant(rng):
    """`R.take(x, [-1, 0])` of a module that was not imported by us."""
    x = rng.standard_normal((5, 8)).astype("float32")
    bb = relax.BlockBuilder()
    var = relax.Var("x", relax.TensorType((5, 8), "float32"))
    index = relax.const(np.array([-1, 0]), "int64")
    with bb.function("main", [var]):
        bb.emit_func_output(bb.emit(relax.op.take(var, index, axis=0)))
    np.testing.assert_array_equal(run(bb.get(), None, x), x[[-1, 0]])

"""The attention passes make the graph of an imported Llama smaller, layer by layer."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.benchmarks.graph_size import exported, our_size

pytestmark = pytest.mark.slow

OPERATORS = {
    "eager": 13,  # those of sdpa; both products, the transpose, scale, mask and softmax but one op
    "sdpa": 8,  # what repeats keys and values: two new axes, a broadcast and a reshape each
}
KERNELS = {"eager": 2, "sdpa": 0}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_llama_layer_has_fewer_operators_and_kernels(implementation, dynamic):
    """And what the layers share is smaller, too: no mask of the whole model is built."""
    one, two = (exported(n, implementation, dynamic=dynamic) for n in (1, 2))
    sizes = {(how, p): our_size(p, how) for how in ("off", "exact") for p in (one, two)}
    before, after = (sizes[how, two] - sizes[how, one] for how in ("off", "exact"))
    assert before.operators - after.operators >= OPERATORS[implementation]
    assert before.kernels - after.kernels >= KERNELS[implementation]
    assert (sizes["off", one] - sizes["exact", one]).operators - (before - after).operators >= 35

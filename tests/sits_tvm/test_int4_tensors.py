import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

import sits_tvm.int4_tensors  # noqa: F401  what is tested happens at import


@pytest.mark.parametrize(("dtype", "low", "high"), [("int4", -8, 8), ("uint4", 0, 16)])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (16, 4), (0, 4)])
def test_values_survive(dtype, low, high, shape, rng):
    values = rng.integers(low, high, shape).astype("int8")
    array = values.astype(getattr(ml_dtypes, dtype))
    for tensor in (tvm.runtime.tensor(array), relax.const(array, dtype).value):
        assert str(tensor.dtype) == dtype
        assert np.array_equal(tensor.numpy().astype("int8"), values)


def test_strided_arrays_too(rng):
    values = rng.integers(-8, 8, (6, 4)).astype("int8")
    array = values.astype(ml_dtypes.int4).T[::2]
    assert np.array_equal(tvm.runtime.tensor(array).numpy(), values.T[::2])


def test_the_bytes_are_in_the_order_that_tvm_reads():
    """TVM reads int4 itself, high nibble first, but forgets the sign."""
    from sits_tvm.int4_tensors import _numpy

    tensor = tvm.runtime.tensor(np.array([1, -2, 3], ml_dtypes.int4))
    assert _numpy(tensor).tolist() == [1, 14, 3]


def test_a_copy_of_a_tensor_keeps_its_values():
    tensor = tvm.runtime.tensor(np.array([1, -2, 3], ml_dtypes.int4))
    assert tensor.copyto(tvm.cpu()).numpy().tolist() == [1, -2, 3]


def test_values_out_of_range_are_refused():
    for value in (np.int8(8), np.int64(259), np.int64(-255), 2**62, 3.7, np.nan):
        with pytest.raises(ValueError, match=f"int4 holds integers -8…7, not {value}"):
            tvm.runtime.empty((2,), "int4").copyfrom(np.array([1, value]))
    with pytest.raises(ValueError, match="shape"):
        tvm.runtime.empty((2,), "int4").copyfrom(np.array([1, 2, 3], "int8"))


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "float8_e4m3fn", "bool"])
def test_other_dtypes_are_left_to_tvm(dtype):
    array = np.array([0, 1, 1, 0]).astype(getattr(ml_dtypes, dtype, dtype))
    assert np.array_equal(tvm.runtime.tensor(array).numpy(), array)

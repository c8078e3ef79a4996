import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from sits_tvm.quick_parsing import quick_stack


def parsed(n):
    """A module that needs everything TVM reads of the stack: a class, and a name from outside."""

    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def double(a: T.Buffer((n,), "float32"), b: T.Buffer((n,), "float32")):
            for i in range(n):
                with T.sblock("double"):
                    v = T.axis.spatial(n, i)
                    b[v] = a[v] * T.float32(2)

        @R.function
        def main(x: R.Tensor((n,), "float32")) -> R.Tensor((n,), "float32"):
            return R.call_tir(Module.double, (x,), out_ty=R.Tensor((n,), "float32"))

    return Module


def test_tvmscript_means_the_same():
    slow = parsed(8)
    with quick_stack():
        assert_structural_equal(parsed(8), slow)


def test_frames_are_those_of_the_standard_library():
    def fields(frames):
        return [(f.filename, f.function, f.code_context and f.code_context[0]) for f in frames]

    slow = fields(inspect.stack())
    with quick_stack():
        quick = fields(inspect.stack())
    assert quick[1:] == slow[1:]


def test_the_slow_one_comes_back():
    before = inspect.stack
    with quick_stack():
        assert inspect.stack is not before
    assert inspect.stack is before


def test_other_threads_have_the_slow_one():
    """It finds the module of a frame, which is what takes the time, and all lines of context."""

    def other():
        with quick_stack():
            quick = len(inspect.stack(3)[0].code_context)
        return quick, len(inspect.stack(3)[0].code_context), inspect.stack()[0].function

    with quick_stack(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result(10) == (1, 3, "other")
        assert len(inspect.stack(3)[0].code_context) == 1


def test_blocks_of_two_threads_overlap():
    """The one that began first ends first; the function comes back with the last."""
    before, entered, left = inspect.stack, threading.Event(), threading.Event()

    def other():
        with quick_stack():
            entered.set()
            assert left.wait(20)
            return len(inspect.stack(3)[0].code_context)

    with ThreadPoolExecutor(1) as pool:
        with quick_stack():
            made = pool.submit(other)
            assert entered.wait(20)
        left.set()
        assert made.result(20) == 1
    assert inspect.stack is before

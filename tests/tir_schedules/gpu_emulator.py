"""Run a CUDA kernel on the CPU as TVM lowers it: a block at a time, its threads as NumPy arrays.

PTX does here what the PTX ISA says. Stricter than a GPU, an `EmulationError` tells what a GPU may
or may not show: an access out of bounds or across threads without a barrier, a read of shared
memory that nothing was written to or whose copy is under way, threads apart at a barrier.
"""

from itertools import product

import numpy as np
from gpu_block import Block, Global, demand
from gpu_translator import HostArguments, Translator
from tvm import tirx
from tvm.ir import IRModule


class Emulated:
    """``emulated(*arrays)`` runs a scheduled PrimFunc; its last argument is what it writes.

    Attributes
    ----------
    trips : list of int
        How often each loop ran, of all blocks of the last run.
    """

    def __init__(self, func, target):
        with target:
            bound = tirx.transform.BindTarget(target)
            mod = bound(IRModule({"main": func.with_attr("global_symbol", "main")}))
            mod = tirx.get_tir_pipeline("s_tir")[0](mod)
        self.host, self.device, self.func = mod["main"], mod["main_kernel"], func
        self.translated = Translator(self.device)
        scope = {"np": np}
        exec(self.translated.text, scope)
        self.run, self.trips = scope["run"], []

    def __call__(self, *arrays):
        symbols, tensors = {}, {}
        for buffer, array in zip(self.func.params, arrays, strict=True):
            tensors[f"{buffer.name}_ptr"] = Global(str(buffer.name), array)
            for dim, extent in zip(buffer.shape, array.shape, strict=True):
                if isinstance(dim, tirx.Var):
                    symbols[str(dim.name)] = extent
        scalars = HostArguments(self.host, self.device, symbols).values
        params = [{**tensors, **scalars}[str(param.name)] for param in self.device.params]
        self._launch(params)
        written = list(tensors.values())[-1]
        demand(written.writes == 1, f"{written.name}: elements not written once")

    def extents(self, scope=None):
        """Of the grid and of a block, by tag; `scope` has the values of the parameters."""
        extents = self.translated.extents
        return {tag: int(eval(text, {"np": np}, scope or {})) for tag, text in extents.items()}

    def _launch(self, params):
        extent = self.extents(dict(zip(self.translated.params, params, strict=True)))
        self.trips = []
        demand([n > 0 for n in extent.values()], f"no launch: {extent}")
        threads = {tag: n for tag, n in extent.items() if tag.startswith("threadIdx")}
        grid = {tag: n for tag, n in extent.items() if tag.startswith("blockIdx")}
        order = sorted(threads, reverse=True)  # x varies fastest
        lanes = np.indices([threads[tag] for tag in order], "int32").reshape(len(order), -1)
        for place in product(*map(range, grid.values())):
            index = dict(zip(grid, map(np.int64, place), strict=True))
            block = Block({**index, **dict(zip(order, lanes, strict=True))}, lanes.shape[1])
            with np.errstate(all="ignore"):
                self.run(block, *params)
            self.trips += block.trips

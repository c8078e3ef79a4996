"""The threads of a block as NumPy arrays, its memory, and PTX as the ISA says."""

import ml_dtypes
import numpy as np

LANES = 32
WORD, CHUNK = 4, 16  # bytes that cp.async copies at least, and at most
UNWRITTEN, READABLE, ARRIVED, COPYING = range(4)
"""States of a word of shared memory: ARRIVED is for the thread that copied it alone."""


class EmulationError(Exception):
    """The kernel does what a GPU need not bear."""


def demand(condition, message):
    if not np.all(condition):
        raise EmulationError(message)


class Global:
    """A tensor in global memory; `writes` counts stores of each element."""

    def __init__(self, name, array):
        self.name, self.flat = name, array.reshape(-1)
        self.writes = np.zeros(self.flat.size, "int64")

    def check(self, index, count=1):
        inside = (index >= 0) & (index + count <= self.flat.size)
        demand(inside, f"{self.name}: index out of bounds")


class Block:
    """The threads of a block: what the text of `Translator` calls.

    A local buffer has a row of values, one per thread, for each of its elements.
    """

    def __init__(self, index, threads):
        self.index, self.threads, self.trips = index, threads, []
        self.active = np.ones(threads, bool)
        self.copies = [[]]  # groups of cp.async, the last one open
        self.bytes = self.state = self.was_read = None

    def all_threads(self, what):
        demand(self.active, f"{what}: threads are apart")

    def spread(self, value):
        return np.broadcast_to(value, (self.threads,))

    # Control flow

    def loop(self, start, extent):
        self.all_threads("loop")
        start, extent = np.broadcast_arrays(start, extent)
        demand((start == start.flat[0]) & (extent == extent.flat[0]), "loop: bounds differ")
        self.trips.append(max(int(extent.flat[0]), 0))
        yield from (start.flat[0] + i for i in range(self.trips[-1]))

    def where(self, condition):
        before = self.active
        self.active = before & condition
        if self.active.any():
            yield
        self.active = before

    def choose(self, condition, yes, no):
        values = []
        for case, value in ((condition, yes), (np.logical_not(condition), no)):
            before, self.active = self.active, self.active & case
            values.append(value())
            self.active = before
        return np.where(condition, *values)

    # Memory

    def registers(self, count, dtype):
        return [np.zeros(self.threads, dtype) for _ in range(count)]

    def shared_memory(self, count, dtype):
        size = count * np.dtype(dtype).itemsize
        demand(size % WORD == 0 and self.bytes is None, "one buffer of whole words")
        self.bytes = np.full((size // WORD, WORD), 0xFF, "uint8")  # NaN
        self.state = np.full(len(self.bytes), UNWRITTEN)
        self.was_read = np.zeros(len(self.bytes), bool)
        return self.bytes

    def load(self, buffer, index):
        if not isinstance(buffer, Global):
            return buffer[int(index)]  # an index that differs by thread would need local memory
        index = np.where(self.active, index, 0)
        buffer.check(index[self.active])
        found = np.zeros(self.threads, buffer.flat.dtype)
        found[self.active] = buffer.flat[index[self.active]]
        return found

    def store(self, buffer, index, value):
        old = buffer[int(index)]
        buffer[int(index)] = np.where(self.active, value, old).astype(old.dtype)

    def cast(self, value, dtype):
        return np.asarray(value).astype(dtype)[()]

    def exp2(self, value):
        return np.exp2(value)

    def type_annotation(self):
        return None

    def tvm_access_ptr(self, _, buffer, offset, extent, __):
        demand(buffer is self.bytes and offset == 0, "an address of all shared memory")
        return 0

    def cuda_cvta_generic_to_shared(self, address):
        return np.uint32(address)

    def words(self, address, size):
        """Indices of the words from each active thread's address on."""
        address = self.spread(address)[self.active].astype("int64")
        demand(address % size == 0, "shared memory: misaligned")
        demand(address + size <= self.bytes.size, "shared memory: out of bounds")
        return address[:, None] // WORD + np.arange(size // WORD)

    def read(self, address, size):
        """The bytes of each active thread."""
        words = self.words(address, size)
        demand(self.state[words] == READABLE, "shared memory read before its copy is complete")
        self.was_read[words] = True
        return self.bytes[words].reshape(-1, size)

    def tvm_storage_sync(self, *_):
        self.all_threads("barrier")
        self.state[self.state == ARRIVED] = READABLE
        self.was_read[:] = False

    # PTX

    def ptx_cp_async_cg_src_size(self, address, source, size, source_size, *_):
        demand(size == CHUNK, "cp.async.cg copies 16 bytes")
        self.ptx_cp_async_ca_src_size(address, source, size, source_size)

    def ptx_cp_async_ca_src_size(self, address, source, size, source_size, *_):
        tensor, index = source
        words, index = self.words(address, size), self.spread(index)[self.active]
        is_there = self.spread(source_size)[self.active] > 0
        count = size // tensor.flat.itemsize
        tensor.check(index[is_there], count)
        demand(index[is_there] % count == 0, f"{tensor.name}: misaligned")
        demand(len(np.unique(words)) == words.size, "a word of one thread alone")
        demand(~self.was_read[words], "overwritten while other threads may read it")
        demand(self.state[words] != COPYING, "two copies at once")
        data = np.zeros((*words.shape, WORD), "uint8")
        found = tensor.flat[index[is_there, None] + np.arange(count)]
        data[is_there] = np.ascontiguousarray(found).view("uint8").reshape(-1, size // WORD, WORD)
        self.state[words], self.bytes[words] = COPYING, 0xFF
        self.copies[-1].append((words, data))

    def ptx_cp_async_commit_group(self, *_):
        self.all_threads("commit_group")
        self.copies.append([])

    def ptx_cp_async_wait_group(self, pending, *_):
        self.all_threads("wait_group")
        for group in self.copies[: len(self.copies) - 1 - pending]:
            for words, data in group:
                self.bytes[words], self.state[words] = data, ARRIVED
            group.clear()

    def ptx_ldmatrix(self, *arguments):
        """Lanes 8 i to 8 i + 7 address the rows of matrix i; a lane gets two elements of each."""
        self.all_threads("ldmatrix")
        *destinations, address = arguments[:5]
        transposed = "trans" in arguments[5:]
        matrices = self.read(address, CHUNK).view("uint16").reshape(-1, 4, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        for i, destination in enumerate(destinations):
            pairs = np.ascontiguousarray(matrices[:, i]).view("uint32")
            self.store(*destination, pairs.reshape(-1))

    def ptx_ld_vec(self, *arguments):
        """Four words from shared memory."""
        *destinations, address = arguments[:5]
        self.all_threads("ld")
        words = self.read(address, 4 * WORD).view("float32")
        for destination, word in zip(destinations, words.T, strict=True):
            self.store(*destination, word)

    def ptx_mma(self, *arguments):
        """m16n8k16: pairs along k of A and B, C in float32, by the fragment tables of the ISA."""
        self.all_threads("mma")
        kind = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[arguments[-4]]
        a, b, c = arguments[4:8], arguments[8:10], arguments[10:14]
        halves = lambda registers: np.stack(registers).view(kind).astype("float32")  # noqa: E731
        left = halves(a).reshape(2, 2, -1, 8, 4, 2)  # k half, row half, warp, row, pair, element
        left = left.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        right = halves(b).reshape(2, -1, 8, 4, 2)  # k half, warp, column, pair, element
        right = right.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        product_ = (left @ right).reshape(-1, 2, 8, 4, 2)  # warp, row half, row, pair, element
        product_ = product_.transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for destination, old, more in zip(arguments[:4], c, product_, strict=True):
            self.store(*destination, old + more)

    def _round_pair(self, destination, upper, lower, dtype):
        pair = np.stack([self.spread(lower), self.spread(upper)], axis=-1).astype(dtype)
        self.store(*destination, pair.view("uint32").reshape(-1))

    def ptx_cvt_f16x2_f32(self, destination, upper, lower, *_):
        self._round_pair(destination, upper, lower, np.float16)

    def ptx_cvt_bf16x2_f32(self, destination, upper, lower, *_):
        self._round_pair(destination, upper, lower, ml_dtypes.bfloat16)

    def tvm_warp_shuffle_xor(self, mask, value, distance, width, _):
        self.all_threads("shuffle")
        demand(mask == 0xFFFFFFFF and width == LANES, "a shuffle of whole warps")
        return value[np.arange(self.threads) ^ distance]

    def tvm_warp_shuffle(self, mask, value, lane, width, _):
        self.all_threads("shuffle")
        demand(mask == 0xFFFFFFFF and width <= LANES, "a shuffle within each group of lanes")
        own = np.arange(self.threads)
        return value[own - own % width + self.spread(lane) % width]

    def ptx_st(self, address, *arguments):
        """Words to global memory, from as many registers."""
        tensor, index = address
        words = [self.spread(x)[self.active] for x in arguments if not isinstance(x, str)]
        data = np.stack(words, axis=-1).view(tensor.flat.dtype)
        index, count = self.spread(index)[self.active], data.shape[1]
        tensor.check(index, count)
        demand(index % count == 0, f"{tensor.name}: misaligned")
        places = index[:, None] + np.arange(count)
        tensor.flat[places] = data
        np.add.at(tensor.writes, places, 1)

    ptx_st_vec = ptx_st

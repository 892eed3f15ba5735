"""Host memory that a CUDA device reads and writes at the speed of its bus.

MLX keeps computed arrays in device memory. The host cannot get their address, and reading one moves
all of it to managed memory, at a few GB/s, on the calling thread. A slab is managed memory that
stays with the host and is mapped for the device: plain MLX operations copy rows into it and out of
it, ordered like all others on their stream, so no copy can race with a change of its source.

A slab is written as an MLX array by one owner; afterwards the host reads its memory. It returns to
the pool with the last reference to that memory. Slabs never go back to MLX's own cache of buffers,
which would hand them out for computing.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from keepwarm.kv.buffers import HostArray, Shape, word_of

Memory: TypeAlias = np.ndarray[Any, Any]
TensorPath: TypeAlias = tuple[str, str]  # path of the layer, name of the tensor

LOG = logging.getLogger(__name__)
ALIGNMENT = 256
MIN_STEP = 1 << 14  # between sizes of slabs
READY_BYTES = 1 << 30  # prepared at once, in at most so many slabs of a size:
MAX_READY = 32
AHEAD_BYTES = 16 << 30  # prepared when none was taken for a while: beside prompts it costs time
MAX_AHEAD = 512
QUIET_S = 1.0
PREPARING_THREADS = 2  # one alone prepares fewer than a fast GPU fills
AT_ONCE_BYTES = 512 << 20  # prepared together: MLX has each wait for work on the device
STAYS_WITH_HOST = 3  # CU_MEM_ADVISE_SET_PREFERRED_LOCATION
MAPPED_BY_DEVICE = 5  # CU_MEM_ADVISE_SET_ACCESSED_BY
HOST, DEVICE = -1, 0


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class Slab:
    """One slab. The device writes `array`, or the host writes `memory`; then both may be read."""

    def __init__(self, pool: SlabPool, array: mx.array) -> None:
        self.array = array
        self._memory: Memory | None = None
        self._lock = threading.Lock()
        self._give_back = pool.give_back
        self._unread = weakref.finalize(self, pool.give_back, array)
        self._unread.atexit = False

    @property
    def memory(self) -> Memory:
        """Its bytes; waits until the device has written them."""
        with self._lock:
            if self._memory is None:
                self._memory = self._map()
            return self._memory

    def _map(self) -> Memory:
        """From here on the slab goes back to the pool with the last reference to its memory."""
        memory: Memory = np.asarray(self.array)
        self._unread.detach()
        weakref.finalize(memory, self._give_back, self.array).atexit = False
        return memory


class Place(NamedTuple):
    """Where a tensor is in a slab."""

    start: int
    shape: Shape
    dtype: mx.Dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    @property
    def end(self) -> int:
        return self.start + self.n_bytes


class SlabPlan:
    """Where the tensors of a block are in its slab; many blocks share one plan."""

    def __init__(self, places: Mapping[TensorPath, Place]) -> None:
        self.places = places
        self.n_bytes = sum(place.n_bytes for place in places.values())
        self.slab_bytes = aligned(max((place.end for place in places.values()), default=0))


class SlabArray(HostArray):
    """An array in a slab, which a device may still be writing."""

    def __init__(self, slab: Slab, start: int, shape: Shape, dtype: mx.Dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.slab, self.start = slab, start

    @property
    def data(self) -> memoryview:
        """Its bytes; waits until the device has written them."""
        return self.slab.memory.data[self.start : self.start + self.n_bytes]

    @property
    def words(self) -> Memory:
        memory: Memory = self.slab.memory[self.start : self.start + self.n_bytes]
        words: Memory = memory.view(word_of(self.dtype)).reshape(self.shape)
        return words


class SlabPool:
    """All slabs of a store. Any thread may take and give back. New ones are prepared ahead, because
    the first use of a page takes longer than a copy into it: as many as blocks in memory will take,
    up to AHEAD_BYTES. Once the blocks take all of their budget, evicted ones give theirs back."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free: dict[int, deque[mx.array]] = defaultdict(deque)  # by size
        self.n_bytes = 0  # of all slabs
        self._budget = 0  # of the blocks in memory
        self._expected: list[int] = []  # the sizes that are prepared
        self._coming: Counter[int] = Counter()  # those being prepared
        self._last_taken = time.monotonic()
        self._plans: weakref.WeakValueDictionary[Hashable, SlabPlan] = weakref.WeakValueDictionary()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._prepare, name="keepwarm-slabs", daemon=True)
            for _ in range(PREPARING_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def if_cuda(cls) -> SlabPool | None:
        """On CUDA; elsewhere None: the host reads and writes MLX's memory directly."""
        return cls() if on_cuda() else None

    def expect(self, sizes: Iterable[int]) -> None:
        """Prepare slabs of these sizes."""
        with self._changed:
            self._expected = [_rounded(n_bytes) for n_bytes in sizes]
            self._changed.notify_all()

    def allow(self, budget: int) -> None:
        """Prepare no more than blocks of so many bytes take, but for READY_BYTES."""
        with self._changed:
            self._budget = budget
            self._changed.notify_all()

    def will_take(self) -> None:
        """A prompt begins that will be kept: from now on none are prepared ahead beside it."""
        self._last_taken = time.monotonic()

    def take(self, n_bytes: int) -> Slab:
        """A slab of at least this size, with arbitrary content."""
        size = _rounded(n_bytes)
        with self._changed:
            # The one returned last may still have a reference, which ends any moment.
            array = self._free[size].popleft() if self._free[size] else None
            self._last_taken = time.monotonic()
            if self._lacking(is_quiet=True) is not None:
                self._changed.notify_all()
        return Slab(self, self._make(size) if array is None else array)

    def shared(self, plan: SlabPlan) -> SlabPlan:
        """The first plan with the same places, so that work for it is done once."""
        with self._changed:
            return self._plans.setdefault(tuple(plan.places.items()), plan)

    def give_back(self, array: mx.array) -> None:
        with self._changed:
            self._free[array.nbytes].append(array)

    def trim(self, n_bytes: int) -> None:
        """Free this many bytes of unused slabs: memory is short, so none are prepared ahead now."""
        self.allow(0)
        self._drop(n_bytes)

    def _drop(self, n_bytes: int) -> None:
        with self._changed:
            dropped = []
            for size in sorted(self._free, key=self._expected.__contains__):
                arrays = self._free[size]
                n_dropped = min(len(arrays), -(-max(0, n_bytes) // size))
                dropped += [arrays.pop() for _ in range(n_dropped)]
                n_bytes -= n_dropped * size
            self.n_bytes -= sum(array.nbytes for array in dropped)
        if dropped:
            dropped.clear()
            mx.clear_cache()  # or MLX would compute in them, over the bus

    @property
    def free_bytes(self) -> int:
        with self._changed:
            return sum(size * len(arrays) for size, arrays in self._free.items())

    def close(self) -> None:
        """Free all that are not in use."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._drop(self.free_bytes)

    def _make(self, size: int) -> mx.array:
        self._drop(self.free_bytes - 2 * READY_BYTES - min(AHEAD_BYTES, self._budget))
        with self._changed:
            self.n_bytes += size
        return _make(size, 1)[0]

    def _prepare(self) -> None:
        while (batch := self._next_batch()) is not None:
            size, n_slabs = batch
            try:
                arrays = _make(size, n_slabs)
            except Exception:  # memory is short: each request makes its own from now on
                LOG.exception("host memory could not be prepared")
                self._give_up(size, n_slabs)
                continue
            with self._changed:
                self._coming[size] -= n_slabs
                while arrays:
                    self.give_back(arrays.pop())

    def _give_up(self, size: int, n_slabs: int) -> None:
        with self._changed:
            self._coming[size] -= n_slabs
            self.n_bytes -= size * n_slabs
            self._expected = []

    def _next_batch(self) -> tuple[int, int] | None:
        """Size and number of the slabs to be prepared next, which are counted; None at the end."""
        with self._changed:
            while not self._is_closed:
                quiet_in_s = self._last_taken + QUIET_S - time.monotonic()
                if (batch := self._lacking(is_quiet=quiet_in_s <= 0)) is not None:
                    size, n_slabs = batch
                    self.n_bytes += size * n_slabs
                    self._coming[size] += n_slabs
                    return batch
                is_short = self._lacking(is_quiet=True) is not None
                self._changed.wait(max(0.01, quiet_in_s) if is_short else None)
            return None

    def _lacking(self, is_quiet: bool) -> tuple[int, int] | None:
        """A size of which too few are ready, and how many to prepare at once."""
        for size in self._expected:
            n_free = len(self._free[size]) + self._coming[size]
            n_ready = min(MAX_READY, max(2, READY_BYTES // size))
            n_ahead = min(MAX_AHEAD, AHEAD_BYTES // size) if is_quiet else 0
            n_allowed = max(0, self._budget - self.n_bytes) // size
            if (n_lacking := max(n_ready - n_free, min(n_ahead - n_free, n_allowed))) > 0:
                return size, min(n_lacking, max(1, AT_ONCE_BYTES // size))
        return None


def on_cuda() -> bool:
    """Whether models run on CUDA."""
    return mx.default_device() == mx.gpu and mx.cuda.is_available()


def _rounded(n_bytes: int) -> int:
    """A little more, so that there are few sizes; at least one byte more, because MLX takes an
    update of a whole array as a new array."""
    step = max(MIN_STEP, 1 << (n_bytes.bit_length() - 6)) if n_bytes > MIN_STEP else MIN_STEP
    return (n_bytes // step + 1) * step


def _make(n_bytes: int, n_slabs: int) -> list[mx.array]:
    """Slabs whose pages exist, on the host: the CPU has written them."""
    arrays = [mx.zeros((n_bytes,), mx.uint8, stream=mx.cpu) for _ in range(n_slabs)]
    mx.eval(arrays)
    for array in arrays:
        _advise(np.asarray(array))
    return arrays


def _advise(memory: Memory) -> None:
    """Keep these pages on the host, mapped for the device. Best effort; failure is ignored."""
    driver, context = _driver()
    if driver is not None and not driver.cuCtxSetCurrent(context):
        for advice, processor in ((STAYS_WITH_HOST, HOST), (MAPPED_BY_DEVICE, DEVICE)):
            driver.cuMemAdvise(memory.ctypes.data, memory.nbytes, advice, processor)


@cache
def _driver() -> tuple[Any, ctypes.c_void_p]:
    """CUDA's driver and the context that MLX uses; the driver is None if there is none."""
    context = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, context
    driver.cuMemAdvise.argtypes = (
        ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
    )  # fmt: skip
    failed = driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), DEVICE)
    return (None if failed else driver), context

"""Rows copied to a CUDA device through a small buffer of host memory that the device reads.

On CUDA, MLX's arrays are managed memory, whose pages migrate to the side that accesses them, at a
few GB/s at best. So the host does not write rows into an array. It writes them to a buffer that
stays in host memory, and the device copies them from there: five times as fast.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from keepwarm.kv.buffers import HostArray, uninitialized_arrays, word_of
from keepwarm.kv.layout import TensorSpec

SLOT_BYTES = 32 << 20
ALIGNMENT = 256
STAYS_WITH_HOST = 3  # CU_MEM_ADVISE_SET_PREFERRED_LOCATION
MAPPED_BY_DEVICE = 5  # CU_MEM_ADVISE_SET_ACCESSED_BY
HOST, DEVICE = -1, 0


class _Copy(NamedTuple):
    target: DeviceRows
    at: int
    rows: mx.array


class _Slot(threading.local):
    """One thread's staging buffer, and the copies that wait in it."""

    def __init__(self, n_bytes: int) -> None:
        ((self.array, self.memory),) = uninitialized_arrays([((n_bytes,), mx.uint8)])
        self.memory[:] = 0
        _advise(self.memory)
        self.used = 0
        self.copies: list[_Copy] = []


class Staging:
    """Any thread may write rows; each has its own slot, and the device empties full ones."""

    def __init__(self, slot_bytes: int = SLOT_BYTES) -> None:
        self._slot_bytes = slot_bytes
        self._slot = _Slot(slot_bytes)
        self._lock = threading.Lock()  # the device's copies change arrays that all threads share

    @classmethod
    def if_cuda(cls) -> Staging | None:
        """On CUDA; elsewhere None, and the host writes into the arrays directly."""
        is_cuda = mx.default_device() == mx.gpu and mx.cuda.is_available()
        return cls() if is_cuda else None

    def write(self, target: DeviceRows, at: int, rows: HostArray) -> None:
        slot, n_bytes = self._slot, rows.n_bytes
        if slot.used + n_bytes > self._slot_bytes:
            self.flush()
        if n_bytes > self._slot_bytes:
            slot.copies.append(_Copy(target, at, rows.to_mx()))
            return
        start, end = slot.used, slot.used + n_bytes
        rows.write_to(slot.memory[start:end].view(word_of(rows.dtype)).reshape(rows.shape))
        staged = slot.array[start:end].view(rows.dtype).reshape(rows.shape)
        slot.copies.append(_Copy(target, at, staged))
        slot.used = -(-end // ALIGNMENT) * ALIGNMENT

    def flush(self) -> None:
        """Let the device copy what this thread has written; the slot is empty afterwards."""
        slot = self._slot
        if not slot.copies:
            return
        with self._lock:
            for target, at, rows in slot.copies:
                target.array[..., at : at + rows.shape[-2], :] = rows
            mx.eval([copy.target.array for copy in slot.copies])
        slot.used = 0
        slot.copies.clear()


class DeviceRows:
    """K or V of one layer in device memory; unwritten rows are zeros."""

    def __init__(self, spec: TensorSpec, zeros: mx.array, staging: Staging) -> None:
        self.spec = spec
        self._staging = staging
        self.array = zeros

    def write(self, at: int, rows: mx.array | HostArray) -> None:
        if isinstance(rows, HostArray):
            self._staging.write(self, at, rows)
        else:
            self.array[..., at : at + rows.shape[-2], :] = rows


def _advise(memory: Any) -> None:
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

"""MLX's buffer limits, which hold for the whole process: high while something runs, else low."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import NamedTuple, Protocol, Self

import mlx.core as mx

from keepwarm.device.memory import MemoryConfig, free_buffers, wired_limit

LOG = logging.getLogger(__name__)


class MemoryDevice(Protocol):
    """MLX's process-wide memory settings. Setters return the previous value."""

    def set_cache_limit(self, n_bytes: int) -> int: ...

    def set_wired_limit(self, n_bytes: int) -> int: ...

    def clear_cache(self) -> None: ...

    def wired_limit(self) -> int | None: ...


class MLXDevice:
    def set_cache_limit(self, n_bytes: int) -> int:
        return mx.set_cache_limit(n_bytes)

    def set_wired_limit(self, n_bytes: int) -> int:
        mx.synchronize()  # not while an evaluation is running
        return mx.set_wired_limit(n_bytes)

    def clear_cache(self) -> None:
        free_buffers()

    def wired_limit(self) -> int | None:
        return wired_limit()


class Scope:
    """Open until `close`, which may be called twice; `with` calls it."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _ScopeEntry(NamedTuple):
    config: MemoryConfig
    active: bool


class MemoryScopes:
    """MLX's limits hold for the process, so all engines of a process share one of these.

    While any scope is active, the buffer limit is the largest that an active scope asks for;
    otherwise it is the largest idle limit of the open scopes. Closing the last scope restores the
    limits from before the first. In between, the wired limit is the largest the device allows.
    """

    def __init__(self, device: MemoryDevice | None = None) -> None:
        self._device = device or MLXDevice()
        self._lock = threading.Lock()
        self._tokens = count()
        self._scopes: dict[int, _ScopeEntry] = {}
        self._ran = False  # since the last call of `became_idle`
        self._limit: int | None = None  # None: no scope is open, the limit is MLX's own
        self._before = 0
        self._wired_before: int | None = None

    def join(self, config: MemoryConfig) -> Scope:
        """Register an engine with these settings until the scope is closed."""
        return self._open(_ScopeEntry(config, active=False))

    def active(self, config: MemoryConfig) -> Scope:
        """Mark the process as running something until the scope is closed."""
        return self._open(_ScopeEntry(config, active=True))

    def became_idle(self) -> bool:
        """Whether the process ran something and is idle now; True once for each such change."""
        with self._lock:
            if self._is_active():
                return False
            ran, self._ran = self._ran, False
            return ran

    def release_if_idle(self) -> bool:
        """Free MLX's unused buffers unless something runs that would allocate them again."""
        with self._lock:
            idle = not self._is_active()
            if idle:
                self._device.clear_cache()
            return idle

    def _is_active(self) -> bool:
        return any(entry.active for entry in self._scopes.values())

    def _open(self, entry: _ScopeEntry) -> Scope:
        with self._lock:
            token = next(self._tokens)
            self._warn_if_different(entry)
            self._scopes[token] = entry
            self._ran = self._ran or entry.active
            self._apply()
        return Scope(lambda: self._close(token))

    def _close(self, token: int) -> None:
        with self._lock:
            if self._scopes.pop(token, None) is not None:
                self._apply()

    def _apply(self) -> None:
        limit = self._wanted_limit()
        if limit == self._limit:
            return
        if limit is None:
            self._restore()
        elif self._limit is None:
            self._before = self._device.set_cache_limit(limit)
            self._wire()
        else:
            self._device.set_cache_limit(limit)
        self._limit = limit

    def _wanted_limit(self) -> int | None:
        entries = self._scopes.values()
        active = [entry.config.buffer_active_bytes for entry in entries if entry.active]
        idle = [entry.config.buffer_idle_bytes for entry in entries]
        return max(active or idle, default=None)

    def _wire(self) -> None:
        wired = self._device.wired_limit()
        if wired is not None:
            self._wired_before = self._device.set_wired_limit(wired)

    def _restore(self) -> None:
        self._device.set_cache_limit(self._before)
        if self._wired_before is not None:
            self._device.set_wired_limit(self._wired_before)
            self._wired_before = None

    def _warn_if_different(self, entry: _ScopeEntry) -> None:
        others = [other.config.buffers for other in self._scopes.values()]
        if not entry.active and others and entry.config.buffers not in others:
            LOG.warning(
                "Two engines of this process have different memory settings; "
                "MLX has one buffer limit, so the larger one holds for both."
            )


@cache  # one a process: two would restore MLX's limits over each other
def scopes_of_process() -> MemoryScopes:
    return MemoryScopes()

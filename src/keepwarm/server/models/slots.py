"""The models of a server, each with its engine while it is loaded, within one budget of memory.

A request holds a lease on its model. Models are loaded one at a time, on a thread for that. One
that needs room has the least recently used unloaded: pinned ones stay. One that is in use takes
requests as long as those before them keep it loaded, then turns come to an end, key by key.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from keepwarm.concurrency import DeviceLock
from keepwarm.config import Settings
from keepwarm.errors import (
    EngineFailed,
    InsufficientResources,
    KeepwarmError,
    StillLoading,
    Stopping,
)
from keepwarm.models.catalog import locate
from keepwarm.server.models.host import EngineHost, start_engine
from keepwarm.telemetry.ledger import Ledger
from keepwarm.units import format_bytes

if TYPE_CHECKING:
    from keepwarm.cache.store import Store
    from keepwarm.device.memory import MemoryConfig
    from keepwarm.engine.engine import Engine

LOG = logging.getLogger(__name__)
HAND_OVER_S = 5.0  # for a request that waited to take the lease of its model


@dataclass(eq=False)
class ModelLease:
    """Keeps a model loaded."""

    owner: str  # the key of its request


@dataclass(eq=False)
class Slot:
    """One model. Only `Slots` changes it."""

    host: EngineHost
    names: list[str]
    source: str
    pinned: bool = False
    path: Path | None = None  # of its files, once they are found
    is_offered: bool = False  # it is loaded when a request asks for it
    leases: set[ModelLease] = field(default_factory=set)
    ending: set[ModelLease] = field(default_factory=set)  # until then their keys get no other
    n_waiting: int = 0  # requests that will take a lease once it is loaded
    used: float = 0.0
    is_leaving: bool = False  # it takes no more requests, to be unloaded
    was_awaited: bool = False  # another model waited in vain for its memory
    loading: Future[None] | None = None
    n_loads: int = 0
    n_context: int | None = None  # tokens, once it was loaded
    keep_until: float = 0.0  # before, it is not unloaded because nobody uses it
    expires: bool = False  # it is unloaded once it is idle, unless another request comes first

    @property
    def n_leases(self) -> int:
        return len(self.leases)

    def admits(self, owner: str) -> bool:
        if self.host.loaded is None or self.is_leaving:
            return False
        return all(lease.owner != owner for lease in self.ending & self.leases)

    @property
    def n_bytes(self) -> int:
        """Of its weights, while it is loaded."""
        engine = self.host.loaded
        return 0 if engine is None else engine.model.n_bytes


class Slots:
    """All models of a server. For all threads."""

    def __init__(self, settings: Settings, store: Store | None, ledger: Ledger) -> None:
        self._settings = settings
        self.store = store
        self.all: list[Slot] = []
        self.changing = threading.Lock()  # held while a model is loaded or unloaded
        self.on_close: Callable[[Engine], None] = lambda _: None
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-models")
        self._device = DeviceLock()
        self.ledger = ledger

    def add(self, slot: Slot) -> Slot:
        """This slot, or the one that has the same files already."""
        with self._changed:
            same = [each for each in self.all if each.path == slot.path]
            if not same:
                self.all.append(slot)
            return same[0] if same else slot

    # leases

    def lease(self, slot: Slot, held: ExitStack, owner: str = "") -> bool:
        """Keep a model loaded until `held` is closed; False if it is not, or takes no more."""
        with self._changed:
            if not slot.admits(owner):
                return False
            lease = ModelLease(owner)
            slot.leases.add(lease)
            held.callback(self._release, slot, lease)
            slot.used = time.monotonic()
            slot.expires = False
            self._changed.notify_all()
            return True

    def _release(self, slot: Slot, lease: ModelLease) -> None:
        with self._changed:
            slot.leases.remove(lease)
            slot.used = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def waiting(self, slot: Slot) -> Iterator[None]:
        """While a request waits for a model, and until it has taken its lease."""
        with self._changed:
            slot.n_waiting += 1
        try:
            yield
        finally:
            with self._changed:
                slot.n_waiting -= 1
                self._changed.notify_all()

    # loading

    def loading(self, slot: Slot) -> Future[None]:
        """Done when the model is loaded, or could not be, or nobody waits any more; begun here
        unless it has.
        """
        with self._changed:
            if slot.loading is None:
                slot.loading = self._thread.submit(self._load_on_thread, slot)
            return slot.loading

    def _load_on_thread(self, slot: Slot) -> None:
        try:
            with self.changing:
                if slot.host.loaded is None and slot.is_offered and slot.n_waiting:
                    self.load(slot)
        finally:
            with self._changed:
                slot.loading = None

    def load(self, slot: Slot, *, may_evict: bool = True, in_full: bool = False) -> None:
        """Load a model whose files are known. The caller holds `changing`."""
        try:
            slot.host.load(partial(self._start, slot, may_evict), in_full=in_full)
        except KeepwarmError:
            raise
        except (Exception, SystemExit) as error:
            LOG.exception("%s could not be started", slot.host.name)
            raise EngineFailed(f"{slot.host.name} could not be started ({error}).") from error
        finally:
            with self._changed:
                for other in self.all:
                    other.is_leaving = False
                    other.ending = set()
            self._divide_memory()
        slot.used = time.monotonic()
        slot.n_loads += 1

    def _start(self, slot: Slot, may_evict: bool, report: Callable[[str], None]) -> Engine:
        from keepwarm.models.load import load  # loads MLX
        from keepwarm.text.sandboxed import new_process

        if self.store is None:
            raise Stopping("The server is shutting down; its store is closed.")

        def report_unless_closing(what: str) -> None:
            if self._is_closing:
                raise Stopping("The server is shutting down.")
            report(what)

        report_unless_closing("finding its files")
        slot.path = slot.path or locate(slot.source, self._settings)
        room = partial(self._make_room, slot, may_evict)
        with ExitStack() as opened:  # closed if the rest fails
            sandbox = new_process().start()
            opened.callback(sandbox.close)
            model = load(
                *(str(slot.path), self._settings, report_unless_closing),
                make_room=lambda _, n_bytes: room(n_bytes),
            )
            model = replace(model, name=slot.host.name)
            slot.n_context = model.n_context
            engine = start_engine(
                *(model, self.store, self._settings, report),
                memory=self._divide_memory(model.n_bytes),
                sandbox=sandbox,
                device=self._device,
                ledger=self.ledger,
            )
            opened.pop_all()
        return engine

    # memory

    def _make_room(self, slot: Slot, may_evict: bool, n_bytes: int) -> None:
        """Unload others until `n_bytes` of weights fit; alone a model may take what there is."""
        from keepwarm.device.memory import most_weights
        from keepwarm.device.space import require_memory

        limit = self._settings.weights_bytes or most_weights()
        end = time.monotonic() + self._settings.load_wait_s
        needs = f"{slot.host.name} needs {format_bytes(n_bytes)} for its weights"
        while True:
            others = [other for other in self.all if other.n_bytes and other is not slot]
            if not others or sum(other.n_bytes for other in others) + n_bytes <= limit:
                break
            free = [other for other in others if may_evict and not other.pinned]
            if not free:
                raise InsufficientResources(
                    f"{needs}, and models together may take {format_bytes(limit)}, which those "
                    "that stay loaded use; unpin one, or raise weights_bytes."
                )
            leaver = min(free, key=lambda other: (other.n_leases > 0, other.used))
            if not self._wait_until_idle(leaver, end):
                raise StillLoading(
                    f"{needs}, which models in use take at the moment; retry in a few seconds."
                )
            self.unload(leaver)
        require_memory(slot.host.name, n_bytes)

    def _wait_until_idle(self, slot: Slot, end: float) -> bool:
        """Wait for the requests that run, then let no more in; whether it is idle.

        While requests from before this wait run, it takes others: it could not be unloaded anyway.
        Then those of a key that has none, as long as others' run, for half of the time: so a key
        that lets long answers follow each other keeps out only itself, and no more than half of
        the time goes by before all are kept out for the model that waits. Who waits again waits
        so long for requests from before, too: answers that overlap keep it out once at most.

        One that was just loaded is first used by those that waited for it: or two models that
        take turns might be loaded again and again before anybody is answered.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_awaited(slot), HAND_OVER_S)
            half = (time.monotonic() + end) / 2
            is_again, slot.was_awaited = slot.was_awaited, True
            has_ended = self._wait_for_end(slot, set(slot.leases), half if is_again else end)
            if not (has_ended or is_again):
                return False
            while slot.leases and time.monotonic() < half:
                slot.ending = set(slot.leases)
                self._wait_for_end(slot, slot.ending, half)
            slot.is_leaving = True
            is_idle = self._wait_for_end(slot, slot.leases, end)
            slot.was_awaited = not is_idle
            return is_idle

    def _wait_for_end(self, slot: Slot, leases: set[ModelLease], end: float) -> bool:
        left_s = max(0.0, end - time.monotonic())
        return self._changed.wait_for(lambda: not leases & slot.leases, left_s)

    def _is_awaited(self, slot: Slot) -> bool:
        """Whether a request is about to take a lease; one whose load is still queued is not."""
        return bool(slot.n_waiting) and not slot.n_leases and slot.loading is None

    def _divide_memory(self, more_bytes: int = 0) -> MemoryConfig | None:
        """Divide what the weights leave, with those of one more model if there are any."""
        from keepwarm.device.memory import MemoryConfig

        engines = [slot.host.loaded for slot in self.all if slot.host.loaded is not None]
        n_models = len(engines) + bool(more_bytes)
        if not n_models:
            return None
        n_bytes = sum(engine.model.n_bytes for engine in engines) + more_bytes
        memory = MemoryConfig.automatic(model_bytes=n_bytes).divided(n_models)
        for engine in engines:
            engine.divide_memory(memory)
        return memory

    # unloading

    def unload(self, slot: Slot, drain_s: float = 0.0) -> None:
        """Free a model; its blocks stay on disk. The caller holds `changing`."""
        if slot.host.loaded is not None:
            self.on_close(slot.host.loaded)  # the server has figures while it ends, too
        engine = slot.host.take()
        if engine is not None:
            engine.drain(drain_s)
            self.on_close(engine)
            engine.close()
            del engine
            gc.unfreeze()  # what was there when the server started is frozen
            gc.collect()
            self._divide_memory()

    def keep(self, slot: Slot, seconds: float) -> None:
        """Keep a model loaded for at least so long; 0 is until it is idle."""
        with self._changed:
            slot.expires = seconds == 0
            until = time.monotonic() + seconds
            slot.keep_until = max(slot.keep_until, until) if seconds else 0.0

    def unload_unused(self) -> None:
        """Unload what was not used for `model_ttl_s`, and what is not to be kept."""
        if not self.changing.acquire(blocking=False):
            return
        try:
            for slot in self.all:
                if self._is_unused(slot):
                    self.unload(slot)
                    slot.is_leaving = slot.expires = False
        finally:
            self.changing.release()

    def _is_unused(self, slot: Slot) -> bool:
        """If so, it takes no more requests."""
        with self._changed:
            is_idle = not slot.n_leases and not slot.n_waiting
            is_free = slot.host.loaded is not None and not slot.pinned and is_idle
            is_old = time.monotonic() > self.kept_until(slot)
            slot.is_leaving = is_free and (slot.expires or is_old)
            return slot.is_leaving

    def kept_until(self, slot: Slot) -> float:
        """When it is unloaded if nobody uses it; infinity is never."""
        ttl_s = self._settings.model_ttl_s
        if slot.pinned or not ttl_s:
            return math.inf
        return max(slot.used + ttl_s, slot.keep_until)

    def close(self) -> None:
        """Stop all engines after flushing what they computed."""
        self._is_closing = True
        self.offer_no_more()
        self._thread.shutdown(cancel_futures=True)
        for slot in self.all:
            slot.host.close()

    def offer_no_more(self) -> None:
        """From now on no request has a model loaded."""
        for slot in self.all:
            slot.is_offered = False

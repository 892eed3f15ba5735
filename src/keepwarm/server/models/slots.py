"""The models of a server, each with its engine while it is loaded, within one budget of memory.

A request holds a lease on its model. Models are loaded one at a time, on a thread for that. One
that needs room has the least recently used unloaded: pinned ones stay. Keys that use it have their
turns first. Then it takes requests as long as those before them keep it loaded, and comes to an
end key by key.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from keepwarm.concurrency import DeviceLock
from keepwarm.config import Settings
from keepwarm.errors import (
    Busy,
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
TURN_ANSWERS = 20  # that a key may have more than another which waits for a model
NEXT_REQUEST_S = 0.5  # after its last answer a key still uses a model
LOOK_S = 0.1  # between two looks at whether it does


@dataclass(eq=False)
class ModelLease:
    """Keeps a model loaded."""

    owner: str  # the key of its request


class KeyTurns:
    """Whose turn it is, of keys that use models which do not fit together.

    A key keeps its model beside one that waits until it has had TURN_ANSWERS more than the other
    had while this one waited. So keys that never pause have twice as many in turn, and one that
    asks now and then waits for no more answers than it has itself.
    """

    def __init__(self) -> None:
        self._ahead: Counter[tuple[str, str]] = Counter()  # of the one, beside the other

    def count(self, owner: str, waiting: Iterable[str]) -> None:
        """An answer of one key, while others wait for its model to make room."""
        for other in waiting:
            if other != owner and self._ahead[owner, other] < TURN_ANSWERS:
                self._ahead[owner, other] += 1
                self._ahead[other, owner] -= 1

    def has_turn(self, owner: str, waiting: Iterable[str]) -> bool:
        ahead = [self._ahead[owner, other] for other in waiting if other != owner]
        return bool(ahead) and max(ahead) < TURN_ANSWERS


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
    waiting: Counter[str] = field(default_factory=Counter)  # requests for a lease, by key
    makes_room_for: Slot | None = None
    used: float = 0.0
    used_by: dict[str, float] = field(default_factory=dict)  # when each key's last lease ended
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
        """Not a key with a lease that is to end first, nor one that waits for the other model; and
        none once all of those have ended.
        """
        if self.host.loaded is None or self.is_leaving:
            return False
        if not self.ending:
            return True
        owners = {lease.owner for lease in self.ending & self.leases}
        return bool(owners) and owner not in owners | self.awaiting

    @property
    def n_waiting(self) -> int:
        return self.waiting.total()

    @property
    def awaiting(self) -> set[str]:
        """The keys that wait for the model which needs its room."""
        return set(self.makes_room_for.waiting) if self.makes_room_for else set()

    def blocks_itself(self, leases: set[ModelLease]) -> bool:
        """Whether only keys that wait for its room keep it loaded, with these leases."""
        owners = {lease.owner for lease in leases & self.leases}
        return bool(owners) and owners <= self.awaiting

    @property
    def users(self) -> set[str]:
        """Keys with a request, or whose next one may follow."""
        since = time.monotonic() - NEXT_REQUEST_S
        recent = {owner for owner, when in self.used_by.items() if when > since}
        return recent | {lease.owner for lease in self.leases}

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
        self._is_offering = False  # from the end of the start until the server stops
        self._is_stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-models")
        self._device = DeviceLock()
        self._turns = KeyTurns()
        self.ledger = ledger

    def add(self, slot: Slot) -> Slot:
        """This slot, or the one that has the same files already."""
        with self._changed:
            same = [each for each in self.all if each.path == slot.path]
            if not same:
                slot.is_offered = self._is_offering
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
            slot.used = slot.used_by[lease.owner] = time.monotonic()
            self._turns.count(lease.owner, slot.awaiting)
            self._changed.notify_all()

    @contextmanager
    def waiting(self, slot: Slot, owner: str = "") -> Iterator[None]:
        """While a request waits for a model, and until it has taken its lease."""
        with self._changed:
            slot.waiting[owner] += 1
        try:
            yield
        finally:
            with self._changed:
                slot.waiting -= Counter([owner])  # without keys that wait no more
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
                    other.ending, other.makes_room_for = set(), None
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
            if not self._wait_until_idle(leaver, end, slot):
                what = f"{needs}, which models in use take at the moment; retry in a few seconds."
                raise self.late(slot, StillLoading(what))
            self.unload(leaver)
        require_memory(slot.host.name, n_bytes)

    def late(self, slot: Slot, error: StillLoading) -> KeepwarmError:
        """What a request is told that has waited for this model in vain."""
        for other in self.all:
            is_own = other.makes_room_for is slot and other.blocks_itself(other.leases)
            if is_own and "" not in slot.waiting:
                return Busy(
                    f"{slot.host.name} needs the memory of {other.host.name}, which other requests "
                    "of this API key use; wait for them."
                )
        return error

    def _wait_until_idle(self, slot: Slot, end: float, other: Slot | None = None) -> bool:
        """Let keys that use it have their turns, wait for the requests that run, then let no more
        in; whether it is idle, to make room for `other`.

        While requests from before this wait run, it takes others: it could not be unloaded anyway.
        Then those of a key that has none, as long as others' run, for half of the time: so a key
        that lets long answers follow each other keeps out only itself, and no more than half of
        the time goes by before all are kept out for the model that waits; but not because of
        requests of the key that waits. Who waits again waits so long for requests from before, too:
        answers that overlap keep it out once at most.

        One that was just loaded is first used by those that waited for it: or two models that
        take turns might be loaded again and again before anybody is answered.
        """
        with self._changed:
            slot.makes_room_for = other
            self._changed.wait_for(lambda: not self._is_awaited(slot), HAND_OVER_S)
            self._wait_for_turns(slot, end)
            half = (time.monotonic() + end) / 2
            is_again, slot.was_awaited = slot.was_awaited, True
            running = set(slot.leases)
            has_ended = self._wait_for_end(slot, running, half if is_again else end)
            if not (has_ended or is_again):
                return False
            while slot.leases:
                until = end if slot.blocks_itself(running) else half
                if time.monotonic() >= until:
                    break
                slot.ending = running = set(slot.leases)
                self._wait_for_end(slot, running, until)
            slot.is_leaving = True
            is_idle = self._wait_for_end(slot, slot.leases, end)
            slot.was_awaited = not is_idle
            return is_idle

    def _wait_for_turns(self, slot: Slot, end: float) -> None:
        """For a quarter of the time at most."""
        end = (3 * time.monotonic() + end) / 4
        while time.monotonic() < end:
            waiting = slot.awaiting
            if not any(self._turns.has_turn(user, waiting) for user in slot.users):
                return
            self._changed.wait(LOOK_S)

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

    def offer(self, slot: Slot | None = None) -> None:
        """From now on requests have this model loaded, or all of them; unless the server stops."""
        with self._changed:
            if not self._is_stopping:
                self._is_offering |= slot is None
                for each in [slot] if slot else self.all:
                    each.is_offered = True

    def offer_no_more(self) -> None:
        """From now on no request has a model loaded."""
        with self._changed:
            self._is_stopping, self._is_offering = True, False
            for slot in self.all:
                slot.is_offered = False

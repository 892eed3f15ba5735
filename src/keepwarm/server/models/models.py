"""The models of a server as requests see them: one by name, all of them together."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from starlette.concurrency import run_in_threadpool

from keepwarm.agents.shares import AgentLimits
from keepwarm.config import Settings
from keepwarm.errors import (
    BadInput,
    InsufficientResources,
    KeepwarmError,
    StillLoading,
    Stopping,
    UnknownModel,
)
from keepwarm.models import builtin, hub
from keepwarm.models.catalog import (
    check_name,
    find,
    find_local,
    n_context,
    read_config,
    read_generation_config,
)
from keepwarm.models.embedder import read_embedder
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.slots import Slot, Slots
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.sampling_rules import DrawRules, default_rules

if TYPE_CHECKING:
    from keepwarm.cache.restore.forgetting import Deletions
    from keepwarm.cache.restore.writing import WriteStats
    from keepwarm.cache.store import Store
    from keepwarm.engine.engine import Engine
    from keepwarm.engine.live import LiveStats
    from keepwarm.engine.stats import Stats
    from keepwarm.server.http.permits import PrepareSlot

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedModel:
    """One name that requests may use."""

    name: str
    created: int
    is_loaded: bool
    n_context: int | None  # None: its files do not say before it is loaded
    sampling: DrawRules  # where a request is silent
    shares_batches: bool | None = None
    path: Path | None = None  # of its files, once they are found

    @classmethod
    def of_slot(cls, name: str, slot: Slot, settings: Settings) -> Self:
        engine = slot.host.loaded
        if engine is None:
            found = cls.on_disk(name, slot.host.created, slot.path, settings)
            return replace(found, n_context=slot.n_context or found.n_context)
        context, batches = engine.model.n_context, engine.stats().shares_batches
        rules = engine.sampling
        return cls(name, slot.host.created, True, context, rules, batches, slot.path)

    @classmethod
    def on_disk(cls, name: str, created: int, path: Path | None, settings: Settings) -> Self:
        rules = default_rules(read_generation_config(path) if path else {}, settings)
        return cls(name, created, False, _context(path, settings), rules, path=path)


def _context(path: Path | None, settings: Settings) -> int | None:
    """Of a directory; a .gguf file takes long to read."""
    if path is None or not path.is_dir():
        return None
    try:
        own = n_context(read_config(path))
    except KeepwarmError as error:
        LOG.info("%s", error)
        return None
    return min(own, settings.context or own)


LATEST = ":latest"  # Ollama writes it behind names that have no other tag


def plain(name: str) -> str:
    return name.removesuffix(LATEST)


class NamedModel(NamedTuple):
    """A model by the name that requests use, and by what it is found."""

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> NamedModel:
        """`name=model`, or a model that is its own name; a path may have an equals sign."""
        name, equals, source = map(str.strip, text.partition("="))
        is_named = equals and name and source and "/" not in name
        return cls(name, source) if is_named else cls(text, text)


def key_of(source: str) -> str:
    """The same for every way to write a model's path."""
    path = None if source in builtin.BUILTINS else find_local(source)
    return source if path is None else str(path.resolve())


def configured(settings: Settings) -> list[NamedModel]:
    """The models that the settings name, the first one first."""
    texts = [settings.model, *settings.listed("more_models")]
    models = list(dict.fromkeys(map(NamedModel.parse, texts)))
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"Two models are called {name!r}; give one another name: NAME=MODEL.")
    for name in settings.listed("pinned_models"):
        if name not in names:
            known = ", ".join(map(repr, names))
            raise BadInput(f"pinned_models names {name!r}, and the server has {known}; choose one.")
    return models


def check_models(settings: Settings) -> None:
    """Refuse names that can be no model, before anything is started for them."""
    for model in configured(settings):
        check_name(model.source)


class OnDemand:
    """Models on this machine that the operator lets requests load. Reads files; never downloads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._patterns = settings.listed("on_demand")

    def allows(self, name: str) -> bool:
        """A path only by a pattern that is one: `*` stands for names."""
        is_path = name.startswith("/")
        if is_path and ".." in Path(name).parts:
            return False
        patterns = (each for each in self._patterns if each.startswith("/") or not is_path)
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    def find(self, name: str) -> Path | None:
        if not self.allows(name):
            return None
        path = find(name, self._settings)
        if path is None and name.startswith("/"):
            path = find_local(name)
        return path and path.resolve()

    def names(self) -> Iterator[str]:
        """Those that have a name; a path is none."""
        if self._patterns:
            known = [name for name in builtin.BUILTINS if find(name, self._settings)]
            yield from filter(self.allows, [*known, *hub.all_cached()])


OnThread: TypeAlias = Callable[..., Awaitable[Any]]
LOOK_AGAIN_S = 0.1  # whether a model takes a request that waits
MOST_CHECKS_S = 10.0  # between two looks at which models are unused


class Closed(NamedTuple):
    """The engines that were closed."""

    engine: weakref.ref[Engine]  # the last of them
    stats: Stats  # its own, but the counters of live caches are of all
    before: LiveStats | None  # of those before it


def _with_counts(live: LiveStats, ended: LiveStats) -> LiveStats:
    """The counters of both, and what the first holds."""
    names = ("moved", "copied", "misses", "evicted")
    return live._replace(**{name: getattr(live, name) + getattr(ended, name) for name in names})


class Models:
    """Finds the model that a request names, and has it loaded. The first one is the default."""

    def __init__(self, first: EngineHost, settings: Settings, store: Store | None = None) -> None:
        """`first` may have an engine already, with its store."""
        engine = first.loaded
        self._settings = settings
        self.on_demand = OnDemand(settings)
        self._closed: Closed | None = None
        self.ledger = engine.ledger if engine else Ledger()
        store = engine.store if store is None and engine else store
        if store is not None:
            store.limit(AgentLimits.of(settings))
            store.add_forget(self._forget_texts)
        self.slots = Slots(settings, store, self.ledger)
        self.slots.on_close = self._note_closed
        self.default = Slot(first, [first.name], settings.model)
        self.slots.all.append(self.default)
        self._named = [self.default]  # by the settings; requests may add more
        if engine is not None:
            self.default.path = engine.model.path
            self.slots.offer()

    @classmethod
    def of(cls, settings: Settings, store: Store) -> Models:
        """Those that the settings name; `start` loads them."""
        named = configured(settings)
        models = cls(EngineHost(None, named[0].name), settings, store)
        models.default.source = named[0].source
        models.default.pinned = named[0].name in settings.listed("pinned_models")
        for model in named[1:]:
            models._add_named(model)
        models._named = list(models.slots.all)
        return models

    def _add_named(self, model: NamedModel) -> None:
        """A second name of a model shares its engine."""
        pinned = model.name in self._settings.listed("pinned_models")
        same = [slot for slot in self.slots.all if key_of(slot.source) == key_of(model.source)]
        if same:
            same[0].names.append(model.name)
            same[0].pinned |= pinned
        else:
            host = EngineHost(None, model.name)
            self.slots.all.append(Slot(host, [model.name], model.source, pinned))

    def start(self) -> None:
        """Load all that fit, the first one in any case; the others are loaded when asked for."""
        for slot in self._named:
            with self.slots.changing:
                try:
                    self.slots.load(slot, may_evict=False, in_full=slot is self.default)
                except InsufficientResources as error:
                    if slot is self.default:
                        raise
                    LOG.warning("%s It is loaded when a request asks for it.", error)
            self.slots.offer(slot)
        self.slots.offer()

    # requests

    async def use(
        self, name: str | None, slot: PrepareSlot, *, to_embed: bool = False
    ) -> EngineHost:
        """The model that a request names, which stays loaded until the request has ended.

        An unknown name is the default, but where vectors are wanted the only embedder, or refused:
        vectors of two models cannot be compared.
        """
        found = await self._find(name, slot.on_thread, to_embed)
        if not self._lease(found, slot.held, slot.owner):
            async with slot.paused():
                await self._wait_for(found, slot.held, slot.owner, slot.check_client)
        return found.host

    @asynccontextmanager
    async def using(self, name: str | None = None, owner: str = "") -> AsyncIterator[EngineHost]:
        """The same for a request that is not prepared."""
        slot = await self._find(name, run_in_threadpool)
        with ExitStack() as held:
            await self._wait_for(slot, held, owner)
            yield slot.host

    async def _find(self, name: str | None, on_thread: OnThread, to_embed: bool = False) -> Slot:
        found = self.known(name)
        short = plain(name or "")
        if found is None and self.on_demand.allows(short):
            found = await on_thread(self.find_on_demand, short)
        if found is None and name is not None:
            if to_embed:
                found = await on_thread(self._only_embedder)
            if self._settings.strict_model or (to_embed and found is None):
                raise self.unknown(name)
        return found or self.default

    def _only_embedder(self) -> Slot | None:
        """Loaded or not. Reads files."""
        found = [slot for slot in self.slots.all if self._is_embedder(slot)]
        return found[0] if len(found) == 1 else None

    def _is_embedder(self, slot: Slot) -> bool:
        if (engine := slot.host.loaded) is not None:
            return engine.model.embedder.is_declared
        path = slot.path or find(slot.source, self._settings) or find_local(slot.source)
        return path is not None and read_embedder(path, {}).is_declared

    def unknown(self, name: str) -> UnknownModel:
        known = ", ".join(repr(each) for slot in self.slots.all for each in slot.names)
        return UnknownModel(f"Model {name!r} is not loaded; this server has {known}.")

    def listed(self) -> Iterator[ListedModel]:
        """What requests may name, the default first. Reads files."""
        if not self.ready:
            _ = self.engine  # says why, as while the server starts
        yield from self.all_listed()

    def all_listed(self) -> Iterator[ListedModel]:
        """The same, also while none of them is offered."""
        names = []
        for slot in list(self.slots.all):
            names += slot.names
            yield from (ListedModel.of_slot(each, slot, self._settings) for each in slot.names)
        for name in self.on_demand.names():
            if name not in names:
                path = self.on_demand.find(name)
                yield ListedModel.on_disk(name, self.first.created, path, self._settings)

    def answering(self, name: str) -> ListedModel:
        """The model that answers a request of this name, as it is listed. Reads files."""
        listed = list(self.listed())
        found = [each for each in listed if each.name in (name, plain(name))]
        if not found and (path := self.on_demand.find(plain(name))):
            created = self.first.created
            found = [ListedModel.on_disk(plain(name), created, path, self._settings)]
        if not found and self._settings.strict_model:
            raise self.unknown(name)
        return (found or listed)[0]

    def known(self, name: str | None) -> Slot | None:
        for each in (name, plain(name or "")):
            for slot in self.slots.all:
                if each in slot.names:
                    return slot
        return None

    def may_load(self, name: str) -> bool:
        """Whether requests may name this model, be it on this machine or not."""
        return self.known(name) is not None or self.on_demand.allows(name)

    def serves(self, name: str) -> bool:
        """Whether it answers requests that name this model. Reads files."""
        return self.known(name) is not None or self.on_demand.find(name) is not None

    def keep(self, host: EngineHost, seconds: float) -> None:
        """Keep the model of a request loaded for so long after it; 0: until it is idle."""
        slot = next(slot for slot in self.slots.all if slot.host is host)
        if slot.pinned and not seconds:
            raise BadInput(f"{slot.host.name} is pinned and stays loaded; see pinned_models.")
        self.slots.keep(slot, seconds)

    def find_on_demand(self, name: str) -> Slot | None:
        """The slot of a model that requests may load, added if need be. Reads files."""
        path = self.on_demand.find(name)
        if path is None:
            return None
        if path.is_dir():
            read_config(path)  # refuses what is no model
        return self.slots.add(Slot(EngineHost(None, name), [name], name, path=path))

    def _lease(self, slot: Slot, held: ExitStack, owner: str) -> bool:
        """False if it must be loaded first; raises if it cannot be, as while the server starts."""
        if self.slots.lease(slot, held, owner):
            return True
        if not slot.is_offered:
            _ = slot.host.engine  # says why
            raise Stopping("The model is being unloaded; retry in a few seconds.")
        return False

    async def _wait_for(
        self, slot: Slot, held: ExitStack, owner: str, check: Callable[[], None] = lambda: None
    ) -> None:
        """Have it loaded and take a lease, also if it takes requests of this key again before.

        `check` raises when the client is gone.
        """
        end = time.monotonic() + self._settings.load_wait_s
        loading: asyncio.Future[None] | None = None
        with self.slots.waiting(slot, owner):
            while not self._lease(slot, held, owner):
                check()
                if loading is not None and loading.done():
                    loading.result()
                    loading = None
                loading = loading or self._loading(slot)
                if time.monotonic() >= end:
                    what = f"{slot.host.name} is being loaded ({slot.host.progress})"
                    raise self.slots.late(slot, StillLoading(f"{what}; retry in a few seconds."))
                await asyncio.wait({loading}, timeout=LOOK_AGAIN_S)

    def _loading(self, slot: Slot) -> asyncio.Future[None]:
        loading = asyncio.wrap_future(self.slots.loading(slot))
        loading.add_done_callback(_note_error)
        return loading

    # all of them

    @property
    def first(self) -> EngineHost:
        return self.default.host

    @property
    def loaded(self) -> list[EngineHost]:
        """Models that are loaded, the default first."""
        return [slot.host for slot in self.slots.all if slot.host.loaded is not None]

    @property
    def engines(self) -> list[Engine]:
        found = [slot.host.loaded for slot in self.slots.all]
        return [engine for engine in found if engine is not None]

    @property
    def lost(self) -> str:
        """Why the device computes nothing more, in a sentence."""
        return next((engine.lost for engine in self.engines), "")

    @property
    def engine(self) -> Engine:
        """Any that runs, the default's if it does; raises if none does."""
        return next(iter(self.engines), None) or self.first.engine

    @property
    def store(self) -> Store:
        return self.slots.store or self.first.engine.store

    @property
    def ready(self) -> bool:
        """Whether requests are answered, or their model loaded for them."""
        return any(
            slot.host.ready
            or (slot.is_offered and slot.host.loaded is None and not slot.host.is_draining)
            for slot in self.slots.all
        )

    def stats(self) -> Stats:
        """Over all models, also those that were unloaded."""
        from keepwarm.engine.stats import add_up

        engines, closed = self.engines, self._closed  # in this order none is counted twice or not
        if closed is None:
            return add_up([engine.stats() for engine in engines] or [self.engine.stats()])
        found = [engine.stats() for engine in engines if engine is not closed.engine()]
        if found:
            total = add_up(found)
            return replace(total, live=_with_counts(total.live, closed.stats.live))
        tiers, counters = self.store.tier_stats(), self.ledger.counters()
        return replace(closed.stats, tiers=tiers, counters=counters)

    def _forget_texts(self, deletions: Deletions) -> None:  # noqa: ARG002
        """Also while no model is loaded."""
        self.ledger.forget_texts()

    def _note_closed(self, engine: Engine) -> None:
        """Also twice: before and after it ends its answers."""
        stats, closed = engine.stats(), self._closed
        live, before = stats.live._replace(entries=0, n_bytes=0), None
        if closed is not None:
            before = closed.before if closed.engine() is engine else closed.stats.live
        if before is not None:
            live = _with_counts(live, before)
        self._closed = Closed(weakref.ref(engine), replace(stats, live=live), before)

    # the server's life

    async def keep_house(self) -> None:
        """Unload models, and forget agents, that are not used. Runs as long as the server."""
        ttl_s = self._settings.model_ttl_s
        while True:
            await asyncio.sleep(min(MOST_CHECKS_S, ttl_s / 2 or MOST_CHECKS_S))
            await run_in_threadpool(self.slots.unload_unused)
            if self.slots.store is not None:
                await run_in_threadpool(self.slots.store.forget_expired)

    def start_warmers(self) -> None:
        for host in self.loaded:
            host.start_warmer()

    @property
    def n_unfinished(self) -> int:
        """Requests that a drain waits for."""
        return sum(host.n_unfinished for host in self.loaded)

    def write_stats(self) -> WriteStats | None:
        """Of the store that all models share; None while no model is loaded."""
        return next((engine.store.write_stats() for engine in self.engines), None)

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests; running ones finish, or fail after `timeout_s`."""
        self.slots.offer_no_more()
        hosts = [slot.host for slot in self.slots.all]
        with ThreadPoolExecutor(len(hosts)) as threads:
            list(threads.map(lambda host: host.drain(timeout_s), hosts))

    def close(self) -> None:
        """Stop all engines after flushing everything they computed."""
        self.slots.close()


def _note_error(loading: asyncio.Future[None]) -> None:
    """A request that waits no longer does not look at it."""
    with suppress(asyncio.CancelledError):
        loading.exception()

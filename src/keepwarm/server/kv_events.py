"""Publishes KV events over ZMQ, and sends again what a subscriber has missed.

A thread compares what the server has with what it has published. So nothing is queued between it
and the engine, no event is lost, and what other processes do to the store is published too: the
index of the disk has a list of what came and went.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.store import Store
from keepwarm.engine.live import Live
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain_packed, unpack
from keepwarm.records.record import Part
from keepwarm.server.http.limits import is_loopback
from keepwarm.store.tier import StoredBlock, TierStats

if TYPE_CHECKING:
    from keepwarm.config import Settings
    from keepwarm.server.models.models import Models

Medium: TypeAlias = Literal["GPU", "CPU", "DISK", "EXTERNAL"]
MAX_SHARED = 1 << 17  # blocks that are remembered as shared
MAX_AWAITED = 1 << 14  # the latest blocks that may still be shared


class HeldBlock(NamedTuple):
    key: BlockKey
    parent: BlockKey
    number: int  # in its prompt


Blocks: TypeAlias = dict[BlockKey, HeldBlock]
Holdings: TypeAlias = dict[Medium, Blocks]


class BlockView:
    """The blocks of one model that requests without a tenant and KV options find.

    It only looks: nothing that runs a request tells it anything, or waits for it.
    """

    def __init__(self, restorer: Restorer, live: Live, store: Store) -> None:
        self.restorer, self._live, self._store = restorer, live, store
        self._live_blocks: dict[bytes, Blocks] = {}  # by the tokens of a cache
        self._in_memory: Blocks = {}
        self._stats = TierStats()
        self._on_disk: Blocks = {}
        self._number = 0  # of the last change of the disk
        self._shared: Blocks = {}
        self._awaited: Blocks = {}  # used or written here, and not shared so far

    def look(self) -> Holdings:
        """A medium in which nothing has changed is the very same object as before."""
        came = self._follow_disk()
        live = {key: block for some in self._in_live() for key, block in some.items()}
        if (stats := self._store.memory.stats()) != self._stats:
            self._stats, self._in_memory = stats, self._of_this_model(self._store.memory.walk())
        shared = self._in_shared(live | self._in_memory | came)
        return {"GPU": live, "CPU": self._in_memory, "DISK": self._on_disk, "EXTERNAL": shared}

    def tokens_of(self, key: BlockKey) -> bytes:
        """The packed token ids of a block, or nothing if it is gone."""
        for _, tier in self.restorer.tiers.local.named:
            if (record := tier.read(key, self._part, ())) is not None:
                return record.header.tokens
        return b""

    @property
    def _part(self) -> Part:
        return Part.DELTA if self.restorer.needs.delta else Part.WINDOW

    def _in_live(self) -> Collection[Blocks]:
        """Tokens of a cache are hashed once."""
        name, known = self.restorer.namespace, self._live_blocks
        held = [packed for namespace, packed in self._live.held() if namespace == name]
        self._live_blocks = {one: known.get(one) or _blocks_of(name, one) for one in held}
        return self._live_blocks.values()

    def _follow_disk(self) -> Blocks:
        """Blocks that came there since the last look."""
        self._number, changed = self._store.changes_on_disk(self._number)
        if changed is None:
            self._on_disk = self._of_this_model(self._store.blocks()["disk"])
            return self._on_disk
        came = self._of_this_model(block for block in changed.values() if block is not None)
        if changed:
            left = ((key, block) for key, block in self._on_disk.items() if key not in changed)
            self._on_disk = dict(left) | came
        return came

    def _of_this_model(self, blocks: Iterable[StoredBlock]) -> Blocks:
        """Whole ones that it can restore."""
        return {
            block.key: HeldBlock(block.key, block.parent, block.number)
            for block in blocks
            if block.namespace == self.restorer.namespace
            and block.n_tokens == BLOCK_TOKENS
            and self._part in block.n_bytes
        }

    def _in_shared(self, used: Blocks) -> Blocks:
        """Blocks that were put into a shared tier or found there; a block may be put long after it
        was used. That another machine, or the place itself, has deleted one since is not known.
        """
        tiers = self.restorer.tiers.shared
        if not tiers:
            return self._shared
        before = {key: block for key, block in self._awaited.items() if key not in used}
        new = {key: one for key, one in (before | used).items() if key not in self._shared}
        found = {key for tier in tiers for key in tier.have(new)}
        if found:
            latest = [*self._shared.items(), *((key, new[key]) for key in found)]
            self._shared = dict(latest[-MAX_SHARED:])
        awaited = [(key, block) for key, block in new.items() if key not in found]
        self._awaited = dict(awaited[-MAX_AWAITED:])
        return self._shared


def _blocks_of(namespace: Namespace, packed: bytes) -> Blocks:
    whole = (ref for ref in chain_packed(namespace, packed) if ref.n_tokens == BLOCK_TOKENS)
    return {ref.key: HeldBlock(ref.key, ref.parent, ref.number) for ref in whole}


Event: TypeAlias = list[Any]


def block_hash(key: BlockKey) -> int:
    """Indexers take 64-bit integers: the key's first 8 bytes."""
    return int.from_bytes(key[:8], "big")


def stored_event(block: HeldBlock, medium: Medium, token_ids: Sequence[int]) -> Event:
    parent = None if block.number == 0 else block_hash(block.parent)
    lora_id = None
    key = block_hash(block.key)
    return ["BlockStored", [key], parent, list(token_ids), BLOCK_TOKENS, lora_id, medium]


def removed_event(keys: Sequence[BlockKey], medium: Medium) -> Event:
    return ["BlockRemoved", [block_hash(key) for key in keys], medium]


LOG = logging.getLogger(__name__)
INTERVAL_S = 0.25
REMIND_S = 2.0  # how often the last number is told, though nothing has happened
MAX_EVENTS = 1000  # in a message
MAX_MESSAGES = 1000  # kept to be sent again; then everything is told anew
END = (-1).to_bytes(8, "big", signed=True)  # of a replay


def event_publisher(models: Models, settings: Settings) -> EventPublisher | None:
    """The publisher that the settings ask for, or none."""
    if not settings.kv_events:
        return None
    if settings.api_keys and not settings.share_cache:
        raise BadInput(
            "KV events cannot tell the blocks of one key from another's; set share_cache, or leave "
            "kv_events empty."
        )
    addresses = settings.listed("kv_events")
    if not (settings.kv_events_public or all(map(_is_local, addresses))):
        raise BadInput(
            "KV events are not encrypted, and anyone who reaches them can read them; set "
            "kv_events to an address such as tcp://127.0.0.1:5557, or kv_events_public on a "
            "network that you trust."
        )
    return EventPublisher(models, addresses, settings.kv_events_token_ids)


def _is_local(address: str) -> bool:
    """Whether only this machine reaches it; a name of a network interface may be any."""
    try:
        place = urlsplit(address)
    except ValueError:  # no address at all: binding to it says so
        return False
    return place.scheme in ("ipc", "inproc") or is_loopback(place.hostname or "")


class EventPublisher:
    """A PUB socket for events, and a ROUTER socket for subscribers that have missed some."""

    def __init__(self, models: Models, addresses: Sequence[str], token_ids: bool) -> None:
        self._models, self._token_ids = models, token_ids
        self._context, self._events, self._replay = _bind(addresses)
        self._view: BlockView | None = None
        self._told: Holdings | None = None  # nothing yet
        self._messages: list[tuple[bytes, bytes]] = []  # numbered, since the last snapshot
        # Milliseconds: after a restart numbers go on, or subscribers would take them for old ones.
        self._number = int(1000 * time.time())
        self._sent_at, self._is_reminder = 0.0, False
        self._closing = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="keepwarm-events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closing.set()
            thread.join()
            self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._answer_replays()
                self._publish(self._look())
            except Exception:  # whatever it is, the next look tells what this one did not
                LOG.exception("KV events could not be published")
                self._closing.wait(INTERVAL_S)

    def _look(self) -> Holdings:
        engine = self._models.default.host.loaded
        if engine is None:
            return self._told or {}  # a model that is being loaded again has its blocks
        restorer = engine.lane_of().restorer
        if self._view is None or self._view.restorer is not restorer:
            self._view = BlockView(restorer, engine.live, engine.store)
        return self._view.look()

    def _publish(self, found: Holdings) -> None:
        before = self._told
        if before is None or len(self._messages) >= MAX_MESSAGES:
            self._messages.clear()
            before = {}
            self._send([["AllBlocksCleared"]])
        events: list[Event] = []
        for medium in {**before, **found}:  # a model that is loaded anew may have others
            published, blocks = before.get(medium, {}), found.get(medium, {})
            if published is blocks:
                continue
            new = sorted((blocks[key] for key in blocks.keys() - published), key=_number)
            events += (self._stored(block, medium) for block in new)
            gone = sorted(
                (published[key] for key in published.keys() - blocks), key=_number, reverse=True
            )
            if gone:
                events.append(removed_event([block.key for block in gone], medium))
        self._told = found
        for start in range(0, len(events), MAX_EVENTS):
            self._send(events[start : start + MAX_EVENTS])
        if time.monotonic() - self._sent_at >= REMIND_S:
            self._remind()

    def _stored(self, block: HeldBlock, medium: Medium) -> Event:
        tokens = self._view.tokens_of(block.key) if self._view and self._token_ids else b""
        return stored_event(block, medium, unpack(tokens))

    def _send(self, events: Sequence[Event]) -> None:
        import msgspec

        number = self._number.to_bytes(8, "big")
        rank = 0  # of the engine
        message = msgspec.msgpack.encode([time.time(), list(events), rank])
        self._number += 1
        self._messages.append((number, message))
        self._events.send_multipart([b"", number, message])
        self._sent_at, self._is_reminder = time.monotonic(), not events

    def _remind(self) -> None:
        """Tell the last number again, in a message without events: a subscriber that was not yet
        connected knows by it what it has missed.
        """
        if not self._is_reminder:
            self._send([])
            return
        self._events.send_multipart([b"", *self._messages[-1]])
        self._sent_at = time.monotonic()

    def _answer_replays(self) -> None:
        """Wait a little for subscribers that ask for all from a number on.

        However many ask, events are told in time.
        """
        if self._replay is None:
            self._closing.wait(INTERVAL_S)
            return
        until = time.monotonic() + INTERVAL_S
        while self._replay.poll(max(0.0, 1000 * (until - time.monotonic()))):
            asker, *_, first = self._replay.recv_multipart()
            wanted = (each for each in self._messages if each[0] >= first)
            for number, message in (*wanted, (END, b"")):
                self._replay.send_multipart([asker, b"", number, message])
            if time.monotonic() >= until:
                return


def _number(block: HeldBlock) -> int:
    return block.number


def _bind(addresses: Sequence[str]) -> tuple[Any, Any, Any]:
    """A context, and sockets for events and replays, the second one if it has an address."""
    try:
        import msgspec  # noqa: F401
        import zmq
    except ImportError:
        raise BadInput(
            "KV events need two more packages; run: pip install 'keepwarm[events]'"
        ) from None
    if len(addresses) > 2:
        raise BadInput("kv_events has one address for events and one for replays, no more.")
    context = zmq.Context()
    sockets: list[Any] = []
    for kind, address in zip((zmq.PUB, zmq.ROUTER), addresses, strict=False):
        try:
            sockets.append(context.socket(kind))
            sockets[-1].bind(address)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise BadInput(
                f"KV events cannot be published at {address} ({error}); set kv_events to a free "
                "address of this machine, such as tcp://127.0.0.1:5557."
            ) from None
    return context, sockets[0], sockets[1] if sockets[1:] else None

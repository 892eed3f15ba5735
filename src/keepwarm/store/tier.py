"""What every place that keeps blocks can do, whatever it is made of.

A tier never fails a look-up: an outage, a torn file or a foreign one is a miss, counted and with
its reason kept. Pins, deletions and walks raise StoreFailed. Records are immutable; putting one
that is there already changes nothing.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from keepwarm.errors import StoreFailed
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.store.record import Part, ReadBuffer, Record, RecordView

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Fallible")
TTL_PIN = "mark:"  # begins the owner of a pin that expires; the time of its end follows


class BlockInfo(NamedTuple):
    """A block that is there: its parts, and how many of its last window rows are held."""

    parts: frozenset[Part]
    n_tokens: int
    w_rows: int
    n_bytes: int


class Child(NamedTuple):
    """A block after a prefix, and how many tokens it shares with what is asked for."""

    key: BlockKey
    n_common: int


class CheckpointRef(NamedTuple):
    """A checkpoint below a block: `key` is good if it is the hash of the asker's own tokens."""

    key: BlockKey
    parent: BlockKey
    n_tokens: int


class PutResult(NamedTuple):
    """What became of a put; `durable` is done once it survives a crash, or says what failed.

    A tier without room has not failed: whoever needs a record to be there asks `have`.
    """

    stored: bool  # False: it was there already, there was no room, or writing failed
    durable: Future[None]


class StoredBlock(NamedTuple):
    """One block of a tier, as `walk` shows it."""

    key: BlockKey
    parent: BlockKey
    namespace: Namespace
    number: int
    n_tokens: int
    n_bytes: dict[Part, int]
    used: float
    pinned: bool


@dataclass(frozen=True)
class TierStats:
    blocks: int = 0
    n_bytes: int = 0
    max_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evicted: int = 0
    refused: int = 0  # no room, or all that is kept was worth more
    quarantined: int = 0
    newer: int = 0  # met, and left to a newer Keepwarm
    errors: int = 0


class TierCounts:
    """The counters of a tier, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def stats(self, n_blocks: int, n_bytes: int, max_bytes: int | None) -> TierStats:
        with self._lock:
            return TierStats(n_blocks, n_bytes, max_bytes, **self._counts)


class Fallible(Protocol):
    def note_error(self, error: Exception) -> None: ...


def default_on_io_error(
    nothing: Callable[[], Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For look-ups: files or an index out of order are counted and answered with nothing."""

    def decorate(ask: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(ask)
        def asked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return ask(self, *args, **kwargs)
            except (OSError, sqlite3.Error) as error:
                LOG.warning("%s got no answer: %s", ask.__name__, error)
                self.note_error(error)
                nothing_found: R = nothing()
                return nothing_found

        return asked

    return decorate


@contextmanager
def as_store_errors(tier: Fallible, what: str) -> Iterator[None]:
    """For what somebody must know the end of: an outage is counted, and said in our own words."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        tier.note_error(error)
        raise StoreFailed(
            f"The store could not {what} ({error}); look at its disk, then try again."
        ) from error


class RefusedBlocks:
    """Blocks that got no room, so that what follows them gets none: nobody could reach it."""

    def __init__(self) -> None:
        self._keys: deque[BlockKey] = deque(maxlen=64)  # as many as may be under way at once

    def add(self, key: BlockKey) -> None:
        self._keys.append(key)

    def follows(self, parent: BlockKey, have: Callable[[list[BlockKey]], Any]) -> bool:
        """Whether the parent was refused and is still not there."""
        return parent in self._keys and not have([parent])


class Tier(Protocol):
    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        """Which of these blocks are here, and what of each. Reads no block."""

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        """Children of `parent` that share leading tokens with these, the most first; a few.

        More than one, because the nearest may lack window rows that a neighbour has. Every child
        that these tokens begin with is among them: a conversation that ended there goes on.
        """

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        """Checkpoints among the children of these blocks."""

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        """The record, or only the named tensors of it, verified; None is a miss."""

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[RecordView], None], buffer: ReadBuffer
    ) -> bool:
        """Hand the record to `use` where it lies; False is a miss, even one found out half-way.

        A tensor is verified when it is looked at, and good until the next one is.
        """

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Bring a record nearer that will be read soon; False if it is not here. Asks no index."""

    def put(self, record: Record) -> PutResult:
        """Keep a record unless it is there; evicts to make room, never a pinned block."""

    def touch(self, keys: Collection[BlockKey]) -> None:
        """Say that these blocks were of use now."""

    def pin(self, key: BlockKey, owner: str) -> None:
        """Protect a block from eviction until every owner has let go."""

    def unpin(self, key: BlockKey, owner: str) -> None:
        """Let go; a pin that is not there is no error."""

    def delete_outgrown(self, key: BlockKey) -> None:
        """Remove what a block makes needless: shorter siblings that it serves as well as they do,
        and checkpoints before it that are too many.
        """

    def delete(self, key: BlockKey) -> None:
        """Remove all parts of a block; nothing of it is found, or left behind, afterwards."""

    def walk(self) -> Iterator[StoredBlock]:
        """Every block, in no order; safe while others put and delete."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Finish what is under way and let go of files."""

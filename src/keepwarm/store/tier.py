"""The interface of every tier that stores blocks.

A look-up never fails: an I/O error or a bad file is a counted miss. Pins, deletions and walks raise
StoreFailed. Records are immutable; putting one that the tier already has changes nothing.
"""

from __future__ import annotations

import functools
import logging
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from keepwarm.concurrency import CallDeadline
from keepwarm.errors import StoreFailed
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, Namespace, common_tokens
from keepwarm.records.record import Part, PrefillTime, ReadBuffer, Record, RecordView

LOG = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Fallible")
ReadFault: TypeAlias = Literal["damaged", "unreadable", "newer"]
AGENT = "agent:"  # prefix of the owner that is an agent
NEIGHBOURS = 4  # children that are looked at on each side of a query
TTL_PIN = "mark:"  # prefix of the owner of a pin that expires; its end time follows


class BlockInfo(NamedTuple):
    """A stored block: its parts, the number of its last window rows that are stored, and what it
    took to compute."""

    parts: frozenset[Part]
    n_tokens: int
    w_rows: int
    n_bytes: int
    prefill: PrefillTime | None = None


class NamedBlock(NamedTuple):
    """A block that something refers to; it need not be stored any more."""

    key: BlockKey
    parent: BlockKey
    n_tokens: int

    @property
    def is_open(self) -> bool:
        """Whether longer blocks may begin with this one."""
        return self.n_tokens < BLOCK_TOKENS


class Child(NamedTuple):
    """A child block, and the number of tokens it shares with the query."""

    key: BlockKey
    n_common: int


def by_common_tokens(held: Mapping[BlockKey, bytes], tokens: bytes) -> list[Child]:
    """Those of these blocks that share leading tokens with a query, the longest first."""
    found = [Child(key, common_tokens(own, tokens)) for key, own in held.items()]
    return sorted((child for child in found if child.n_common), key=lambda child: -child.n_common)


class CheckpointRef(NamedTuple):
    """A checkpoint below a block; usable if `key` is the hash of the caller's own tokens."""

    key: BlockKey
    parent: BlockKey
    n_tokens: int


class PutResult(NamedTuple):
    """`durable` is done once the record survives a crash, or has the exception. A power cut too,
    on macOS after `DiskTier.flush`.

    No room is not a failure: a caller that needs the record asks `have`.
    """

    stored: bool  # False: already there, no room, or the write failed
    durable: Future[None]
    n_saved: int = 0  # bytes fewer than the record has, by a code


class StoredBlock(NamedTuple):
    """One block of a tier, as `walk` yields it."""

    key: BlockKey
    parent: BlockKey
    namespace: Namespace
    number: int
    n_tokens: int
    n_bytes: dict[Part, int]
    used: float
    pinned: bool


class BlockChanges(NamedTuple):
    """Blocks of a disk that came or went; `number` is where the next ones begin."""

    number: int
    blocks: dict[BlockKey, StoredBlock | None] | None  # None: gone; instead of all: not known


@dataclass(frozen=True)
class TierStats:
    blocks: int = 0
    n_bytes: int = 0
    max_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    puts: int = 0
    evicted: int = 0
    refused: int = 0  # no room, or everything stored was worth more
    quarantined: int = 0
    newer: int = 0  # records of a newer Keepwarm, skipped
    errors: int = 0


SHARED_STATES = "ok", "half-open", "open", "refused", "too far", "read-only"


@dataclass(frozen=True)
class SharedStats(TierStats):
    """Of a tier that machines share. Bytes and age are known where this machine sweeps it; hits and
    misses are records.
    """

    state: str = "ok"
    last_error: str = ""
    oldest_s: float | None = None


def agent_owner(agent_id: str) -> str:
    """The owner of an agent's pins and blocks."""
    return f"{AGENT}{agent_id}"


class TierCounts:
    """The counters of a tier, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **more: int) -> None:
        with self._lock:
            for name, n in more.items():
                self._counts[name] += n

    def stats(self, n_blocks: int, n_bytes: int, max_bytes: int | None) -> TierStats:
        with self._lock:
            return TierStats(n_blocks, n_bytes, max_bytes, **self._counts)


def is_busy(error: Exception) -> bool:
    """Whether other processes hold a lock for too long; the files themselves may be fine."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    is_locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return isinstance(error, TimeoutError) or is_locked


class Outdated(Exception):
    """Something was deleted on purpose that the caller has not forgotten yet."""


class Fallible(Protocol):
    def note_error(self, error: Exception) -> None: ...


def default_on_io_error(
    default: Callable[[], Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """For look-ups: count an error of the files or the index, and return the default."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except (OSError, sqlite3.Error) as error:
                LOG.warning("%s failed: %s", method.__name__, error)
                self.note_error(error)
                value: R = default()
                return value

        return wrapper

    return decorate


@contextmanager
def as_store_errors(tier: Fallible, what: str) -> Iterator[None]:
    """For changes: count an error of the files or the index, and raise it as StoreFailed."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        tier.note_error(error)
        if is_busy(error):
            raise StoreFailed(
                f"The store could not {what}: another process holds its lock, and may be "
                "suspended; resume or end it, then try again."
            ) from error
        raise StoreFailed(
            f"The store could not {what} ({error}); look at its disk, then try again."
        ) from error


def use_whole(record: Record | None, use: Callable[[RecordView], None]) -> bool:
    """Visit a record that was read whole; False is a miss."""
    if record is not None:
        use(RecordView(record.header, record.tensors))
    return record is not None


class RefusedBlocks:
    """Blocks that got no room; their descendants get none either, as no prefix would reach them."""

    def __init__(self) -> None:
        self._keys: deque[BlockKey] = deque(maxlen=64)  # as many as may be written at once

    def add(self, key: BlockKey) -> None:
        self._keys.append(key)

    def follows(self, parent: BlockKey, have: Callable[[list[BlockKey]], Any]) -> bool:
        """Whether the parent was refused and is still missing."""
        return parent in self._keys and not have([parent])


class BlockTree(Protocol):
    """Which blocks follow which."""

    def children_of(self, parent: BlockKey) -> list[BlockKey]: ...

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        """Blocks of the same parent whose tokens are a proper prefix of this block's."""

    def descendants(self, key: BlockKey) -> list[BlockKey]:
        """Everything below a block, deepest first, without the block itself."""


class LookupTier(Protocol):
    """What planning needs of a tier. Reads no record."""

    def have(self, keys: Collection[BlockKey]) -> dict[BlockKey, BlockInfo]:
        """Which of these blocks the tier has, and which parts. Reads no block."""

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        """A few children of `parent` that share leading tokens with these, the longest first.

        More than one, because the nearest may lack window rows that a neighbour has. Always
        includes every child that is a prefix of these tokens: a conversation may continue there.
        """

    def states(self, parents: Collection[BlockKey]) -> list[CheckpointRef]:
        """Checkpoints among the children of these blocks."""


class ReadableTier(LookupTier, Protocol):
    """What restoring needs of a tier."""

    def read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        """The record, or only the named tensors of it, verified; None is a miss."""

    def visit(
        self, key: BlockKey, part: Part, use: Callable[[RecordView], None], buffer: ReadBuffer
    ) -> bool:
        """Call `use` with the record in place; False is a miss, even one found half-way.

        A tensor is verified when it is accessed, and valid until the next access.
        """

    def take_fault(self, key: BlockKey, part: Part) -> ReadFault | None:
        """Why the last visit of a record was a miss; told once. None: it is just not here."""

    def prefetch(self, key: BlockKey, part: Part) -> bool:
        """Prepare for a read soon; False if the record is not here. Does not use the index."""

    def touch(self, keys: Collection[BlockKey]) -> None:
        """Note that these blocks were used now."""

    def discard(self, key: BlockKey, part: Part, why: str) -> None:
        """Make a record that its reader cannot use a miss, so that the next put replaces it."""


class RemoteLookup(NamedTuple):
    """A prompt, as far as it matters to a shared tier."""

    namespace: Namespace
    refs: Sequence[BlockRef]  # whole blocks, and the open one at the end
    n_whole: int
    n_here: int  # leading whole blocks that this machine has
    has_rows: bool  # some layer needs the rows of every block
    n_window: int  # last blocks whose window rows may be needed
    has_states: bool


class SharedTier(ReadableTier, Protocol):
    """A tier that other machines fill too. Look-ups tell what `ask` has learned."""

    @property
    def is_open(self) -> bool:
        """Whether it is left alone after failures."""

    @property
    def is_trusted(self) -> bool:
        """Whether the last call succeeded."""

    def ask(self, lookup: RemoteLookup, computing_s: float) -> bool:
        """Learn what is there of a prompt, if that is worth the time that computing it takes.

        False if it was late: no request waits for two tiers.
        """

    def answers_to(self, namespace: Namespace, texts: Sequence[str]) -> list[bytes]:
        """What machines have told of the answers in conversations whose prompts have these texts,
        those to the first text first.
        """

    def load_s(self, n_bytes: int) -> float:
        """Seconds that loading so many bytes takes."""

    def declined(self) -> None:
        """Loading from it seemed too slow; soon it is measured again."""

    def stats(self) -> TierStats: ...

    def visit(
        self,
        key: BlockKey,
        part: Part,
        use: Callable[[RecordView], None],
        buffer: ReadBuffer,
        deadline: CallDeadline | None = None,
    ) -> bool: ...


class Tier(ReadableTier, Protocol):
    def put(self, record: Record) -> PutResult:
        """Store a record unless it is there; evicts others to make room."""

    def delete_superseded(self, key: BlockKey) -> None:
        """Delete what a block makes redundant, at once or soon: shorter siblings that it can
        replace, and surplus checkpoints before it.
        """

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        """Delete all parts of these blocks; afterwards nothing of them is left."""

    def walk(self) -> Iterator[StoredBlock]:
        """Every block, in any order; safe during concurrent puts and deletes."""

    def stats(self) -> TierStats: ...

    def close(self) -> None:
        """Finish writes and close files."""

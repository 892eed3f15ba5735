"""Live caches: finished caches as arrays, with the exact tokens they hold; the fastest tier.

A cache that the prompt continues is moved out, without a copy. One that must be trimmed, because a
conversation was forked, rewound or edited, stays; the request gets a copy-on-write copy.

A conversation that is rewound, or replaced by a summary of it, leaves its cache behind (`abandon`).
One that its client edits does not: under one owner's name agents run several conversations in turn,
and which of them ended cannot be told. The one that is not used again is evicted first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from keepwarm import kv
from keepwarm.cache.restore.forgetting import Deletions, KeptTokens
from keepwarm.errors import CacheMismatch, UnsupportedCache
from keepwarm.prefix.blocks import Namespace, chain_packed, common_tokens_beyond, pack
from keepwarm.store.index.forgotten import Forgotten


class LiveHit(NamedTuple):
    """Caches of the first `n_tokens` of a prompt, for the caller's use alone."""

    caches: kv.Caches
    n_tokens: int
    n_lossy: int = 0  # of them, restored from rounded blocks


class LiveStats(NamedTuple):
    entries: int
    n_bytes: int
    max_bytes: int
    moved: int
    copied: int
    misses: int
    evicted: int


@dataclass(frozen=True)
class _Entry:
    namespace: Namespace
    packed: bytes  # its tokens
    caches: kv.Caches
    n_bytes: int
    can_trim: bool
    owner: str
    n_lossy: int

    def hit(self, caches: kv.Caches, n_tokens: int) -> LiveHit:
        return LiveHit(caches, n_tokens, min(n_tokens, self.n_lossy))

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // 4

    def has_one_of(self, blocks: Forgotten) -> bool:
        refs = chain_packed(self.namespace, self.packed)
        return blocks.first_in(self.namespace, refs) is not None

    def is_covered_by(self, other: _Entry) -> bool:
        """Whether the other serves every prompt that this one would."""
        same = self.packed == other.packed
        return same or (other.can_trim and other.packed.startswith(self.packed))


class _Match(NamedTuple):
    """An entry by its number, and how many leading tokens of the prompt it serves."""

    number: int
    n_tokens: int


class Live:
    """Bounded by bytes; evicts the least recently used. `put` and `take` on the thread that owns
    MLX; the other methods on any.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._numbers = count()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._abandoned: set[int] = set()
        self._n_bytes = 0
        self._moved = self._copied = self._misses = self._evicted = 0

    def put(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        caches: kv.Caches,
        owner: str = "",
        n_lossy: int = 0,
    ) -> bool:
        """Keep caches that represent exactly these tokens; False if they are too large.

        The caller must not use them afterwards. `owner` is only for `release_owned`; so many tokens
        came from rounded blocks.
        """
        held = kv.token_count(caches)
        if held not in (None, len(tokens)):
            raise CacheMismatch("A finished cache", "the token count", len(tokens), held)
        if not tokens or kv.held_bytes(caches) > self.max_bytes:
            return False
        caches = kv.detached(caches)
        n_bytes, can_trim = kv.held_bytes(caches), _can_trim(caches)
        entry = _Entry(namespace, pack(tokens), caches, n_bytes, can_trim, owner, n_lossy)
        with self._lock:
            for number in [n for n in self._abandoned if self._entries[n].owner == owner]:
                self._remove(number)
            self._add(entry)
        return True

    def resize(self, max_bytes: int) -> None:
        """Change the bound; what no longer fits is evicted."""
        with self._lock:
            self.max_bytes = max_bytes
            self._evict(self._n_bytes - max_bytes)

    def held(self) -> list[tuple[Namespace, bytes]]:
        """The packed tokens of every entry."""
        with self._lock:
            return [(entry.namespace, entry.packed) for entry in self._entries.values()]

    def n_served(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """How many tokens of this prompt `take` would serve."""
        with self._lock:
            match = self._best(namespace, tokens, beyond=0)
            return match.n_tokens if match else 0

    def take(
        self, namespace: Namespace, tokens: Sequence[int], beyond: int = 0, *, keep: bool = False
    ) -> LiveHit | None:
        """Caches of the longest prefix of the prompt that an entry serves, if that is more than
        `beyond` tokens. The last token is never served, because a model must be fed one.

        With `keep` the entry is always copied and stays.
        """
        with self._lock:
            match = self._best(namespace, tokens, beyond)
            if match is None:
                self._misses += 1
                return None
            number, n_tokens = match
            entry = self._entries[number]
            n_excess = entry.n_tokens - n_tokens
            if not n_excess and not keep:
                self._moved += 1
                return entry.hit(self._remove(number).caches, n_tokens)
            self._copied += 1
            self._entries.move_to_end(number)
            return entry.hit(copy_without(entry.caches, n_excess), n_tokens)

    def release(self, n_bytes: int) -> int:
        """Evict the least recently used until this many bytes are free; the bytes freed."""
        with self._lock:
            return self._evict(n_bytes)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Release all entries, or one model's; the bytes freed."""
        return self._release(lambda entry: namespace in (None, entry.namespace))

    def release_owned(self, owner: str) -> int:
        """Release the entries of one conversation, of all models; the bytes freed."""
        return self._release(lambda entry: entry.owner == owner)

    def abandon(self, owner: str, dropped: Forgotten | None = None) -> int:
        """A conversation was rewound or replaced: release what no longer serves it; the bytes
        freed. Where some of its blocks are `dropped`, only what has these.

        A cache that can be trimmed serves the turns that are left, until the next one is put.
        """
        with self._lock:
            of_owner = [item for item in self._entries.items() if item[1].owner == owner]
            owned = {n for n, entry in of_owner if dropped is None or entry.has_one_of(dropped)}
            self._abandoned |= {number for number in owned if self._entries[number].can_trim}
            return sum(self._remove(number).n_bytes for number in owned - self._abandoned)

    def forget(self, deletions: Deletions) -> None:
        """Release what was deleted on purpose."""
        self._release(
            lambda entry: deletions.hold(KeptTokens(entry.owner, entry.namespace, entry.packed))
        )

    @property
    def stats(self) -> LiveStats:
        with self._lock:
            counts = (self._moved, self._copied, self._misses, self._evicted)
            return LiveStats(len(self._entries), self._n_bytes, self.max_bytes, *counts)

    def _add(self, entry: _Entry) -> None:
        for number, other in list(self._of(entry.namespace)):
            if entry.is_covered_by(other) and other.packed != entry.packed:
                self._entries.move_to_end(number)
                return
            if other.is_covered_by(entry):
                self._remove(number)
        self._evict(self._n_bytes + entry.n_bytes - self.max_bytes)
        self._entries[next(self._numbers)] = entry
        self._n_bytes += entry.n_bytes

    def _best(self, namespace: Namespace, tokens: Sequence[int], beyond: int) -> _Match | None:
        """The entry that serves most of a prompt, compared token by token."""
        best, packed = None, pack(tokens)[:-4]  # a model must be fed the last token
        for number, entry in reversed(list(self._of(namespace))):
            if not entry.can_trim and not packed.startswith(entry.packed):
                continue
            if n_common := common_tokens_beyond(entry.packed, packed, beyond):
                best, beyond = _Match(number, n_common), n_common
        return best

    def _of(self, namespace: Namespace) -> Iterator[tuple[int, _Entry]]:
        return (item for item in self._entries.items() if item[1].namespace == namespace)

    def _evict(self, n_bytes: int) -> int:
        freed = 0
        while freed < n_bytes and self._entries:
            freed += self._remove(next(iter(self._entries))).n_bytes
            self._evicted += 1
        return freed

    def _release(self, matches: Callable[[_Entry], bool]) -> int:
        with self._lock:
            numbers = [number for number, entry in self._entries.items() if matches(entry)]
            return sum(self._remove(number).n_bytes for number in numbers)

    def _remove(self, number: int) -> _Entry:
        entry = self._entries.pop(number)
        self._abandoned.discard(number)
        self._n_bytes -= entry.n_bytes
        return entry


def copy_without(caches: kv.Caches, n_excess: int) -> kv.Caches:
    """A copy without the last `n_excess` tokens. The caches may be used and written further."""
    copy = kv.copy_caches(caches)
    if n_excess:
        kv.trim(copy, n_excess)
        copy = kv.copy_caches(copy)  # into buffers of the smaller size
    return kv.evaluate(copy)


def _can_trim(caches: kv.Caches) -> bool:
    try:
        kv.trim(kv.copy_caches(caches), 1)
    except UnsupportedCache:
        return False
    return True

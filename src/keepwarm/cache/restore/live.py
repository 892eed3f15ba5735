"""Finished caches as arrays, with the exact tokens they hold: the fastest place to go on from.

A cache that a prompt continues is moved out and copied nowhere. One that must be trimmed, because
a conversation was forked, rewound or edited, is lent as a copy that shares its memory until it is
written to, and stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import mlx.core as mx

from keepwarm import kv
from keepwarm.errors import CacheMismatch, UnsupportedCache
from keepwarm.prefix.blocks import Namespace, common_tokens_beyond, pack


class LiveHit(NamedTuple):
    """Caches of the first `n_tokens` of a prompt, for the taker alone."""

    caches: kv.Caches
    n_tokens: int


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

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // 4

    def is_covered_by(self, other: _Entry) -> bool:
        """Whether the other serves every prompt that this one would."""
        same = self.packed == other.packed
        return same or (other.can_trim and other.packed.startswith(self.packed))


class _Match(NamedTuple):
    """An entry by its number, and how many leading tokens of the prompt it serves."""

    number: int
    n_tokens: int


class Live:
    """Bounded by bytes, least recently used first out. Put and take on the thread that owns MLX;
    shed, clear and drop from any.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._numbers = count()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._n_bytes = 0
        self._moved = self._copied = self._misses = self._evicted = 0

    def put(
        self, namespace: Namespace, tokens: Sequence[int], caches: kv.Caches, owner: str = ""
    ) -> bool:
        """Keep caches that represent exactly these tokens; False where they are too large.

        They must not be used by whoever gives them. `owner` is for `release_owned` alone.
        """
        held = kv.token_count(caches)
        if held not in (None, len(tokens)):
            raise CacheMismatch("A finished cache", "the token count", len(tokens), held)
        if not tokens or kv.live_bytes(caches) > self.max_bytes:
            return False
        caches = _detached(caches)
        entry = _Entry(
            namespace, pack(tokens), caches, kv.live_bytes(caches), _can_trim(caches), owner
        )
        with self._lock:
            self._add(entry)
        return True

    def n_served(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """How many tokens of this prompt `take` would serve."""
        with self._lock:
            match = self._best(namespace, tokens, beyond=0)
            return match.n_tokens if match else 0

    def take(
        self, namespace: Namespace, tokens: Sequence[int], beyond: int = 0, *, keep: bool = False
    ) -> LiveHit | None:
        """Caches of the longest beginning of the prompt that some entry serves, if that is more
        than `beyond` tokens. The prompt's last token is never served, for a model must be fed one.

        With `keep` even an entry that is moved otherwise stays and is copied.
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
                return LiveHit(self._remove(number).caches, n_tokens)
            self._copied += 1
            self._entries.move_to_end(number)
            return LiveHit(_copy(entry.caches, n_excess), n_tokens)

    def release(self, n_bytes: int) -> int:
        """Drop the least recently used until so many bytes are free; how many it was."""
        with self._lock:
            return self._evict(n_bytes)

    def clear(self, namespace: Namespace | None = None) -> int:
        """Drop all entries, or one model's; the bytes that frees."""
        return self._drop(lambda entry: namespace in (None, entry.namespace))

    def release_owned(self, owner: str) -> int:
        """Drop what one conversation put, whichever model it spoke to; the bytes that frees."""
        return self._drop(lambda entry: entry.owner == owner)

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

    def _drop(self, is_meant: Callable[[_Entry], bool]) -> int:
        with self._lock:
            meant = [number for number, entry in self._entries.items() if is_meant(entry)]
            return sum(self._remove(number).n_bytes for number in meant)

    def _remove(self, number: int) -> _Entry:
        entry = self._entries.pop(number)
        self._n_bytes -= entry.n_bytes
        return entry


def _detached(caches: kv.Caches) -> kv.Caches:
    """The same caches, in memory of their own size: not the room to grow, and not the batch whose
    row a state is. So what is counted is what is held; nothing is copied where it is so already.
    """
    return [kv.decode(_contiguous(kv.encode(cache))) for cache in caches]


def _contiguous(encoded: kv.EncodedCache) -> kv.EncodedCache:
    tensors = {name: mx.contiguous(array) for name, array in encoded.tensors.items()}
    mx.eval(list(tensors.values()))  # layer by layer, so that no second cache is ever whole
    return replace(encoded, tensors=tensors, parts=tuple(map(_contiguous, encoded.parts)))


def _copy(caches: kv.Caches, n_excess: int) -> kv.Caches:
    """A copy without the last tokens."""
    copy = kv.copy_caches(caches)
    if n_excess:
        kv.trim(copy, n_excess)
        copy = kv.copy_caches(copy)  # in buffers that hold no more than is left
    return kv.evaluate(copy)


def _can_trim(caches: kv.Caches) -> bool:
    try:
        kv.trim(kv.copy_caches(caches), 1)
    except UnsupportedCache:
        return False
    return True

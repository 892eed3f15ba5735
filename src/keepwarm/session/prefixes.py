"""The tokens of each conversation's prefix: its system prompt and tools.

Entries are keyed by conversation, model, system prompt and tools. A changed system prompt is a new
entry beside the old one, so that two that alternate both hit.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

MAX_ENTRIES = 256


class PrefixKey(NamedTuple):
    conversation: str
    model: str
    system: str
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def digest(self) -> str:
        """Stable across processes; differs if any part does."""
        parts = [self.conversation, self.model, self.system, tools_hash(self.tools)]
        return blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


@dataclass(frozen=True)
class PrefixEntry:
    conversation: str
    model: str
    system: str
    tools_hash: str
    tokens: tuple[int, ...]
    stored: float  # seconds since the epoch

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class PrefixStats:
    entries: int
    requests: int
    hits: int
    tokens_saved: int  # not rendered and tokenised again

    @property
    def misses(self) -> int:
        return self.requests - self.hits


_Key: TypeAlias = tuple[str, str]  # conversation, digest


class Prefixes:
    """An LRU cache of prefix tokens. Thread-safe."""

    def __init__(
        self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, PrefixEntry] = OrderedDict()
        self._requests = self._hits = self._tokens_saved = 0

    def get(self, prefix: PrefixKey) -> PrefixEntry | None:
        with self._lock:
            key = prefix.conversation, prefix.digest
            entry = self._entries.get(key)
            self._requests += 1
            if entry is not None:
                self._entries.move_to_end(key)
                self._hits += 1
                self._tokens_saved += entry.n_tokens
            return entry

    def store(self, prefix: PrefixKey, tokens: Sequence[int]) -> PrefixEntry:
        conversation, model, system, tools = prefix
        now = self._clock()
        entry = PrefixEntry(conversation, model, system, tools_hash(tools), tuple(tokens), now)
        with self._lock:
            key = conversation, prefix.digest
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return entry

    def invalidate(self, conversation: str) -> int:
        """Delete one conversation's entries for all models; returns how many there were."""
        with self._lock:
            keys = [key for key in self._entries if key[0] == conversation]
            for key in keys:
                del self._entries[key]
            return len(keys)

    def clear(self) -> None:
        """Delete all entries and reset the counters."""
        with self._lock:
            self._entries.clear()
            self._requests = self._hits = self._tokens_saved = 0

    @property
    def stats(self) -> PrefixStats:
        with self._lock:
            counts = (self._requests, self._hits, self._tokens_saved)
            return PrefixStats(len(self._entries), *counts)


def tools_hash(tools: Iterable[Mapping[str, Any]]) -> str:
    """A digest of names and schemas; the order of tools and of keys does not matter."""
    texts = sorted(json.dumps(tool, sort_keys=True) for tool in tools)
    return blake2b(json.dumps(texts).encode(), digest_size=20).hexdigest()

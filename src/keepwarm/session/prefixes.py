"""What a conversation always begins with: its system prompt and tools, as the tokens they become.

Kept by conversation, model, system prompt and tools. Another system prompt is another entry beside
the older one, so that two that take turns both profit.
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
    """Who begins how: what an entry is found by."""

    conversation: str
    model: str
    system: str
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def digest(self) -> str:
        """The same in every process; any change of any part gives another one."""
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
    tokens_saved: int  # that needed no rendering and no tokenising

    @property
    def misses(self) -> int:
        return self.requests - self.hits

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests if self.requests else 0.0


_Key: TypeAlias = tuple[str, str]  # conversation, digest


class Prefixes:
    """Bounded; the least recently used goes first. Any thread may ask."""

    def __init__(
        self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, PrefixEntry] = OrderedDict()
        self._requests = self._hits = self._tokens_saved = 0

    def get(self, opening: PrefixKey) -> PrefixEntry | None:
        """What is known of exactly this opening; a miss leaves all others as they are."""
        with self._lock:
            key = opening.conversation, opening.digest
            entry = self._entries.get(key)
            self._requests += 1
            if entry is not None:
                self._entries.move_to_end(key)
                self._hits += 1
                self._tokens_saved += entry.n_tokens
            return entry

    def store(self, opening: PrefixKey, tokens: Sequence[int]) -> PrefixEntry:
        """Keep the tokens of an opening; what was known of the same one is replaced."""
        conversation, model, system, tools = opening
        now = self._clock()
        entry = PrefixEntry(conversation, model, system, tools_hash(tools), tuple(tokens), now)
        with self._lock:
            key = conversation, opening.digest
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return entry

    def invalidate(self, conversation: str) -> int:
        """Forget one conversation, whichever models it spoke to; how many entries that were."""
        with self._lock:
            gone = [key for key in self._entries if key[0] == conversation]
            for key in gone:
                del self._entries[key]
            return len(gone)

    def clear(self) -> None:
        """Forget all, and begin to count anew."""
        with self._lock:
            self._entries.clear()
            self._requests = self._hits = self._tokens_saved = 0

    @property
    def stats(self) -> PrefixStats:
        with self._lock:
            counts = (self._requests, self._hits, self._tokens_saved)
            return PrefixStats(len(self._entries), *counts)


def tools_hash(tools: Iterable[Mapping[str, Any]]) -> str:
    """Covers names and schemas; the order of tools and of keys does not matter."""
    texts = sorted(json.dumps(tool, sort_keys=True) for tool in tools)
    return blake2b(json.dumps(texts).encode(), digest_size=20).hexdigest()

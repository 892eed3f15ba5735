"""Other ways to decide what is kept, counted in tokens: what the shipped eviction is held against.

Each is told of a request, answers with the tokens it can reuse, and then keeps prompt and answer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from keepwarm.bench.recorded import RecordedRequest
from keepwarm.prefix.blocks import BLOCK_TOKENS


class Cache(Protocol):
    def serve(self, request: RecordedRequest) -> int:
        """How many tokens of the prompt need not be computed; then keep prompt and answer."""


class Sessions:
    """Whole conversations, least recently used; one that is too large keeps what fits."""

    def __init__(self, n_tokens: int) -> None:
        self._limit = n_tokens
        self._held: OrderedDict[int, int] = OrderedDict()
        self._sum = 0

    def serve(self, request: RecordedRequest) -> int:
        held = self._held.pop(request.conversation, 0)
        size = min(request.n_input + request.n_output, self._limit)
        self._held[request.conversation] = size
        self._sum += size - held
        while self._sum > self._limit:
            self._sum -= self._held.popitem(last=False)[1]
        return request.reusable(held)


class TailFirst:
    """Blocks, least recently used first and the last of a chain before the first.

    Blocks used together stand together as a run. What a request leaves behind of the run before it
    stays in its old place, but the block that served its first rows was used now.
    """

    def __init__(self, n_tokens: int) -> None:
        self._limit = n_tokens
        self._runs: OrderedDict[int, int] = OrderedDict()  # tokens by name, the oldest first
        self._name_of: dict[int, int] = {}  # of the run a conversation goes on from
        self._next_name = 0
        self._sum = 0

    def serve(self, request: RecordedRequest) -> int:
        name = self._name_of.get(request.conversation, -1)
        held = self._runs.get(name, 0)
        found = request.reusable(held)
        whole = found // BLOCK_TOKENS * BLOCK_TOKENS
        serving = min(BLOCK_TOKENS, held - whole) if found > whole else 0
        if held > whole + serving:
            self._runs[name] = held - whole - serving
        elif held:
            del self._runs[name]
        if serving:
            self._add(serving)
        self._name_of[request.conversation] = self._add(whole)
        self._grow(self._next_name, request.n_input + request.n_output - whole)
        return found

    def _add(self, n_tokens: int) -> int:
        self._next_name += 1
        self._runs[self._next_name] = n_tokens
        return self._next_name

    def _grow(self, name: int, n_tokens: int) -> None:
        self._sum += n_tokens
        while (over := self._sum - self._limit) > 0 and next(iter(self._runs)) != name:
            oldest, held = next(iter(self._runs.items()))
            left = max(0, held - over) // BLOCK_TOKENS * BLOCK_TOKENS
            self._runs[oldest] = left
            self._sum -= held - left
            if not left:
                del self._runs[oldest]
        whole = self._runs[name] + n_tokens
        left = whole if over <= 0 else (whole - over) // BLOCK_TOKENS * BLOCK_TOKENS
        self._runs[name] = left
        self._sum -= whole - left


@dataclass
class _Entry:
    conversation: int
    n_tokens: int
    n_shared: int  # with the newest request of its conversation


class Fifo:
    """mlx-lm's list: whole sequences, first in first out, so many of them and so many bytes.

    A sequence is dropped early only where it is a prefix of the next, and an answer that comes back
    rendered anew is none.
    """

    def __init__(self, n_tokens: int, max_entries: int | None = None) -> None:
        self._limit = n_tokens
        self._max_entries = max_entries
        self._entries: list[_Entry] = []

    def serve(self, request: RecordedRequest) -> int:
        own = [e for e in self._entries if e.conversation == request.conversation]
        for entry in own:
            entry.n_shared = min(entry.n_shared, request.n_common)
        found = max((request.reusable(entry.n_shared) for entry in own), default=0)
        size = request.n_input + request.n_output
        self._entries.append(_Entry(request.conversation, size, size))
        if self._max_entries and len(self._entries) > self._max_entries:
            del self._entries[0]
        while sum(entry.n_tokens for entry in self._entries) > self._limit:
            del self._entries[0]
        return found

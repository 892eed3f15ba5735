"""Other eviction policies, counted in tokens, to compare ours with.

Each serves a request: it returns the tokens it can reuse, then stores prompt and answer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from benchmarks.requests.recorded import RecordedRequest
from keepwarm.prefix.blocks import BLOCK_TOKENS


def reusable(request: RecordedRequest, n_held: int) -> int:
    """Tokens reused of `n_held` stored ones; at least one token must be fed."""
    return min(request.n_common, n_held, request.n_input - 1)


class Cache(Protocol):
    def serve(self, request: RecordedRequest) -> int:
        """The prompt tokens that are reused; then store prompt and answer."""


class Sessions:
    """LRU of whole conversations; one that is too large is truncated."""

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
        return reusable(request, held)


class TailFirst:
    """LRU of blocks, the end of a chain evicted before its start.

    Blocks used together form a run. What a request does not reuse of a run keeps its old position,
    except the block that it reuses in part, which counts as used now.
    """

    def __init__(self, n_tokens: int) -> None:
        self._limit = n_tokens
        self._runs: OrderedDict[int, int] = OrderedDict()  # tokens by name, the oldest first
        self._name_of: dict[int, int] = {}  # the run that a conversation continues
        self._next_name = 0
        self._sum = 0

    def serve(self, request: RecordedRequest) -> int:
        name = self._name_of.get(request.conversation, -1)
        held = self._runs.get(name, 0)
        found = reusable(request, held)
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
    """mlx-lm's list: FIFO of whole sequences, bounded by number and bytes.

    mlx-lm drops a sequence early only if it is a prefix of the next one; an answer that is rendered
    again is not.
    """

    def __init__(self, n_tokens: int, max_entries: int | None = None) -> None:
        self._limit = n_tokens
        self._max_entries = max_entries
        self._entries: list[_Entry] = []

    def serve(self, request: RecordedRequest) -> int:
        own = [e for e in self._entries if e.conversation == request.conversation]
        for entry in own:
            entry.n_shared = min(entry.n_shared, request.n_common)
        found = max((reusable(request, entry.n_shared) for entry in own), default=0)
        size = request.n_input + request.n_output
        self._entries.append(_Entry(request.conversation, size, size))
        if self._max_entries and len(self._entries) > self._max_entries:
            del self._entries[0]
        while sum(entry.n_tokens for entry in self._entries) > self._limit:
            del self._entries[0]
        return found

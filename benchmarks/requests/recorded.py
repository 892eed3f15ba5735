"""Recorded conversations of coding agents (see data/README.md) in the order of their requests."""

from __future__ import annotations

import heapq
import json
import lzma
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from typing import NamedTuple

N_SLOTS = 8


class RecordedConversation(NamedTuple):
    turns: list[tuple[float, int, int, int]]  # seconds, common, input, output


class RecordedRequest(NamedTuple):
    """One request; its first `n_common` tokens are those of the previous one."""

    now: float
    conversation: int
    n_common: int
    n_input: int
    n_output: int


def load(n_conversations: int | None = None, divisor: int = 1) -> list[RecordedConversation]:
    """The first conversations, all lengths divided by `divisor`."""
    packed = (files("benchmarks.requests") / "data" / "agent-turns.jsonl.xz").read_bytes()
    lines = lzma.decompress(packed).splitlines()[:n_conversations]
    return [
        RecordedConversation([_scaled(turn, divisor) for turn in json.loads(line)["turns"]])
        for line in lines
    ]


def _scaled(turn: Sequence[float], divisor: int) -> tuple[float, int, int, int]:
    seconds, common, *sizes = turn
    n_input, n_output = (max(1, int(size) // divisor) for size in sizes)
    return seconds, min(int(common) // divisor, n_input), n_input, n_output


def requests(
    conversations: Sequence[RecordedConversation], n_slots: int = N_SLOTS
) -> Iterator[RecordedRequest]:
    """All requests by time; when a conversation ends, the next one takes its slot."""
    waiting = iter(range(len(conversations)))
    due = [(0.0, number, 0, 0.0) for number in islice(waiting, n_slots)]
    heapq.heapify(due)
    while due:
        now, number, turn, began = heapq.heappop(due)
        turns = conversations[number].turns
        yield RecordedRequest(now, number, *turns[turn][1:])
        if turn + 1 < len(turns):
            heapq.heappush(due, (began + turns[turn + 1][0], number, turn + 1, began))
        elif (following := next(waiting, None)) is not None:
            heapq.heappush(due, (now, following, 0, now))

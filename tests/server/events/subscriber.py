"""A subscriber of KV events, as an indexer is one: it keeps what the server has."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import msgspec
import zmq

SOON_MS = 60_000


class Subscriber:
    """Blocks by medium, as far as messages have told, and the tokens of each."""

    def __init__(self, events: str, replay: str) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.connect(events)
        self._replay = replay
        self.blocks: dict[str, dict[int, Any]] = defaultdict(dict)
        self.numbers: list[int] = []
        self.tokens: dict[int, list[int]] = {}

    def read(self, timeout_ms: int = SOON_MS) -> bool:
        """Take one message, if one comes."""
        if not self._events.poll(timeout_ms):
            return False
        _, number, message = self._events.recv_multipart()
        self._take(number, message)
        return True

    def read_until(self, happened: Any) -> None:
        until = time.monotonic() + SOON_MS / 1000
        while not happened():
            assert time.monotonic() < until, dict(self.blocks)
            self.read(100)

    def catch_up(self, first: int = 0) -> None:
        """Forget all, and ask for all messages from a number on."""
        self.blocks.clear()
        self.numbers.clear()
        with self._context.socket(zmq.DEALER) as asked:
            asked.connect(self._replay)
            asked.send_multipart([b"", first.to_bytes(8, "big")])
            while asked.poll(SOON_MS):
                _, number, message = asked.recv_multipart()
                if not message:
                    return
                self._take(number, message)
        raise AssertionError("the replay has no end")

    def _take(self, number: bytes, message: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big", signed=True))
        _, events, rank = msgspec.msgpack.decode(message)
        assert rank == 0
        for name, *fields in events:
            getattr(self, f"_{name}")(*fields)

    def _AllBlocksCleared(self) -> None:
        self.blocks.clear()

    def _BlockStored(
        self, hashes: Any, parent: Any, tokens: Any, size: int, lora: Any, medium: str
    ) -> None:
        assert (size, lora) == (256, None)
        assert len(tokens) in (0, 256 * len(hashes))
        for each in hashes:
            assert parent is None or any(parent in blocks for blocks in self.blocks.values())
            self.blocks[medium][each] = parent
            self.tokens[each] = tokens

    def _BlockRemoved(self, hashes: Any, medium: str) -> None:
        for each in hashes:
            del self.blocks[medium][each]

    def close(self) -> None:
        self._context.destroy(linger=0)

"""The protocol of Redis and Valkey, as far as blobs need it: commands in a row, replies in a row.

Values are received straight into the memory they are wanted in: that costs a third of the processor
time of redis-py.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.remote.backend import MAX_PIECES, Take, drop_written

Piece: TypeAlias = bytes | memoryview
Word: TypeAlias = Piece | list[Piece]
Command: TypeAlias = Sequence[Word]
Reply: TypeAlias = "int | bytes | memoryview | list[Reply] | CallError | None"

CHUNK = 1 << 16
MAX_LINE = 1 << 16
SMALL = 1 << 12  # words up to this size are joined
MAX_BULK = 1 << 16  # of a reply that nobody gave memory for
MAX_DEPTH, MAX_ITEMS = 4, 1 << 12


class RespConnection:
    """One connection, for one thread at a time. After a CallError it is of no more use."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self._at = 0  # what was received before is used up

    def exchange(
        self, commands: Sequence[Command], deadline: CallDeadline, take: Take | None = None
    ) -> list[Reply]:
        """Send commands and wait for the reply to each. An error that the server replies with is
        returned in its place. Values that are replies themselves go into memory from `take`.
        """
        try:
            self._send(commands, deadline)
            return [self._reply(deadline, take) for _ in commands]
        except TimeoutError as error:
            raise CallError(f"no answer within {deadline.timeout_s * 1000:.0f} ms") from error
        except (OSError, ValueError) as error:
            raise CallError(str(error)) from error

    def close(self) -> None:
        self._socket.close()

    def _send(self, commands: Sequence[Command], deadline: CallDeadline) -> None:
        pieces = list(_encoded(commands))
        while pieces:
            self._socket.settimeout(deadline.left_s())
            drop_written(pieces, _send_some(self._socket, pieces[:MAX_PIECES]))

    def _reply(self, deadline: CallDeadline, take: Take | None = None, depth: int = 0) -> Reply:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return CallError(rest.decode(errors="replace"))
        number = int(rest)
        if kind == b":" or number == -1:
            return number if kind == b":" else None
        if kind == b"$":
            return self._bulk(number, deadline, take)
        if kind != b"*" or depth == MAX_DEPTH or number > MAX_ITEMS:
            raise ValueError("the server does not speak the protocol of Redis")
        return [self._reply(deadline, None, depth + 1) for _ in range(number)]

    def _bulk(self, n_bytes: int, deadline: CallDeadline, take: Take | None) -> bytes | memoryview:
        if take is None and not 0 <= n_bytes <= MAX_BULK:
            raise ValueError(f"the server sends {n_bytes} bytes")
        memory = memoryview(bytearray(n_bytes)) if take is None else take(n_bytes)
        self._fill(memory, deadline)
        end = bytearray(2)
        self._fill(memoryview(end), deadline)
        if end != b"\r\n":
            raise ValueError("the server does not speak the protocol of Redis")
        return bytes(memory) if take is None else memory

    def _fill(self, memory: memoryview, deadline: CallDeadline) -> None:
        n_here = min(len(memory), len(self._received) - self._at)
        memory[:n_here] = self._received[self._at : self._at + n_here]
        self._at += n_here
        rest = memory[n_here:]
        while rest:
            self._socket.settimeout(deadline.left_s())
            n_read = self._socket.recv_into(rest)
            if not n_read:
                raise ConnectionError("the server closed the connection")
            rest = rest[n_read:]

    def _line(self, deadline: CallDeadline) -> bytes:
        while (end := self._received.find(b"\r\n", self._at)) < 0:
            if len(self._received) - self._at > MAX_LINE:
                raise ValueError("the server does not speak the protocol of Redis")
            self._socket.settimeout(deadline.left_s())
            more = self._socket.recv(CHUNK)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._received = self._received[self._at :] + more
            self._at = 0
        line = bytes(self._received[self._at : end])
        self._at = end + 2
        return line


def _send_some(sock: socket.socket, pieces: Sequence[Piece]) -> int:
    """How much was sent. TLS sends one piece at a time."""
    if isinstance(sock, ssl.SSLSocket):
        return sock.send(pieces[0])
    return sock.sendmsg(pieces)


def _encoded(commands: Iterable[Command]) -> Iterator[Piece]:
    """The bytes to send; large values are not copied."""
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for word in command:
            if isinstance(word, bytes) and len(word) <= SMALL:  # most, and this is the fastest
                small += b"$%d\r\n%b\r\n" % (len(word), word)
                continue
            pieces = [memoryview(p).cast("B") for p in (word if isinstance(word, list) else [word])]
            small += b"$%d\r\n" % sum(map(len, pieces))
            for piece in pieces:
                if len(piece) <= SMALL:
                    small += piece
                    continue
                yield bytes(small)
                yield piece
                small.clear()
            small += b"\r\n"
    yield bytes(small)

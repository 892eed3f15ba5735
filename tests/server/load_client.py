"""Many clients at once, each in talk after talk, many of which they leave in the middle.

A process of its own, so that what it costs is not the server's: it speaks HTTP by hand, and says at
the end, as JSON, what it has seen:

    python -m tests.server.load_client http://127.0.0.1:8181 64 60
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

TOPICS = ("the fox", "the dog", "the tree", "the question", "the answer", "the document")
RULES = "You answer the questions of the user about the words of the document. " * 8
LEAVES = 0.3  # of all requests
LONGEST = 6  # messages of a talk
PATIENCE_S = 300
ENDS = {  # how the last event of a whole stream begins
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.",
}
FAILED = ("event: error", "event: response.failed", 'data: {"error"')


@dataclass
class Seen:
    """What all clients together have seen."""

    whole: int = 0  # streams that were read to their end
    left: int = 0  # streams that were not
    events: int = 0
    slowest_s: float = 0.0  # of all whole streams
    wrong: Counter[str] = field(default_factory=Counter)  # what must not happen, in words

    def is_enough(self, n_clients: int) -> bool:
        """To tell how a server fares: on a busy machine that takes longer."""
        return self.whole > n_clients and self.left > n_clients // 8


class Leaves(Exception):
    """The client has had enough."""


class Client:
    """One of many; which talks it has and when it leaves is chance, the same in every run."""

    def __init__(self, url: str, number: int, seen: Seen) -> None:
        self._place = urlsplit(url)
        self._chance = random.Random(number)
        self._path = list(ENDS)[number % len(ENDS)]
        self._seen = seen
        self._messages: list[dict[str, str]] = []

    async def talk(self, until: float, n_clients: int) -> None:
        await asyncio.sleep(self._chance.random())  # not all at the same instant
        latest = until + PATIENCE_S
        while time.monotonic() < (until if self._seen.is_enough(n_clients) else latest):
            begun = time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await self._turn()
                self._seen.whole += 1
                self._seen.slowest_s = max(self._seen.slowest_s, time.monotonic() - begun)
            except Leaves:
                self._seen.left += 1
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self._seen.wrong[f"{self._path}: {error!r}"] += 1
                await asyncio.sleep(0.1)
            else:
                self._messages.append({"role": "assistant", "content": answer})

    async def _turn(self) -> str:
        """Ask the next question of the talk; the answer as text."""
        if len(self._messages) >= LONGEST or not self._messages:
            self._messages = []
        text = f"What of {self._chance.choice(TOPICS)}, number {self._chance.randrange(40)}?"
        rules = "" if self._messages else RULES
        asked = [*self._messages, {"role": "user", "content": rules + text}]
        async with self._asked(self._body(asked)) as lines:
            answer = await self._read(lines)
        self._messages = asked
        return answer

    async def _read(self, lines: AsyncIterator[str]) -> str:
        leaves = self._chance.random() < LEAVES
        enough = self._chance.randrange(30) if leaves else sys.maxsize
        answer, last = [], ""
        async for line in lines:
            if line.startswith(FAILED):
                raise ValueError(line + await anext(lines, ""))
            if line.startswith("data: {"):
                self._seen.events += 1
                answer.append(text_of(json.loads(line[6:])))
            if line.startswith(("event: ", "data: [")):
                last = line
            if len(answer) > enough:
                raise Leaves
        if not last.startswith(ENDS[self._path]):
            raise ValueError(f"the stream ended after {last!r}")
        return "".join(answer)

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": "m", "stream": True, "temperature": 0.8}
        n_tokens = self._chance.randrange(4, 48)
        if self._path == "/v1/responses":
            return {**body, "input": messages, "max_output_tokens": n_tokens, "store": False}
        return {**body, "messages": messages, "max_tokens": n_tokens}

    @asynccontextmanager
    async def _asked(self, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of the answer; leaving closes the connection, whatever is still to come."""
        reader, writer = await asyncio.open_connection(self._place.hostname, self._place.port)
        try:
            content = json.dumps(body).encode()
            writer.write(
                f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            )
            writer.write(content)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if not head.startswith("HTTP/1.1 200"):
                raise ValueError(head.partition("\r\n")[0] + (await reader.read()).decode())
            yield lines_of(reader)
        finally:
            writer.close()


async def lines_of(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a chunked body; one that is cut off is an error."""
    rest = ""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += (await reader.readexactly(size + 2))[:-2].decode()
        *lines, rest = rest.split("\n")
        for line in lines:
            yield line


def text_of(event: dict[str, Any]) -> str:
    """What an event of any of the three APIs adds to the answer."""
    delta = event.get("delta") or {}
    if "choices" in event:
        delta = event["choices"][0]["delta"] if event["choices"] else {}
    if isinstance(delta, str):
        return delta
    return delta.get("content") or delta.get("text") or ""


async def load(url: str, n_clients: int, seconds: float) -> Seen:
    seen, until = Seen(), time.monotonic() + seconds
    clients = [Client(url, number, seen) for number in range(n_clients)]
    await asyncio.gather(*(client.talk(until, n_clients) for client in clients))
    return seen


if __name__ == "__main__":
    address, n_clients, seconds = sys.argv[1:]
    seen = asyncio.run(load(address, int(n_clients), float(seconds)))
    sys.stdout.write(json.dumps(asdict(seen)))

"""Bodies while they come in: read when the route asks for them, counted, and not too slowly."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Message, Receive

from keepwarm.errors import Busy, SlowBody, TooLarge

BODIES = 8  # of the largest size, in memory at once
BODIES_OF_ONE_KEY = 4
BYTES_PER_S = 16 << 10  # a client that is slower for long is given up


class BodyBudget:
    """Bytes of the bodies of unfinished requests: of all keys, and of one key."""

    def __init__(self, max_body_bytes: int) -> None:
        self._limit = BODIES * max_body_bytes
        self._each = BODIES_OF_ONE_KEY * max_body_bytes
        self._used: Counter[str] = Counter()

    def take(self, owner: str, n_bytes: int) -> None:
        if self._used.total() + n_bytes > self._limit:
            raise Busy("The bodies of all requests in progress are too large; retry shortly.")
        if self._used[owner] + n_bytes > self._each:
            raise Busy("The bodies of this key's requests in progress are too large; wait for one.")
        self._used[owner] += n_bytes

    def give_back(self, owner: str, n_bytes: int) -> None:
        self._used[owner] -= n_bytes
        if not self._used[owner]:
            del self._used[owner]


class BodyShare:
    """One request's part of the budget."""

    def __init__(self, budget: BodyBudget, owner: str, max_bytes: int) -> None:
        self._budget = budget
        self._owner = owner
        self._max_bytes = max_bytes
        self._n_bytes = 0

    def reserve(self, n_bytes: int) -> None:
        """Make room for a body of this size, or of at least this size; raises if there is none."""
        if n_bytes > self._max_bytes:
            raise TooLarge(f"The body is larger than {self._max_bytes} bytes; send a smaller one.")
        if n_bytes > self._n_bytes:
            self._budget.take(self._owner, n_bytes - self._n_bytes)
            self._n_bytes = n_bytes

    def release(self) -> None:
        self._budget.give_back(self._owner, self._n_bytes)
        self._n_bytes = 0


class BodyReader:
    """The `receive` of one request. `reserve` is called with the size so far, for every part."""

    def __init__(self, receive: Receive, timeout_s: float, reserve: Callable[[int], None]) -> None:
        self._receive = receive
        self._reserve = reserve
        self._left_s = timeout_s  # that the client may keep us waiting
        self._n_bytes = 0
        self._ended = False

    async def __call__(self) -> Message:
        if self._ended:
            return await self._receive()  # only the client's leaving is left to come
        message = await self._next()
        n_bytes = len(message.get("body", b""))
        self._n_bytes += n_bytes
        self._left_s += n_bytes / BYTES_PER_S
        self._ended = not message.get("more_body", False)
        self._reserve(self._n_bytes)
        return message

    async def _next(self) -> Message:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                return await self._receive()
        except TimeoutError as error:
            raise SlowBody(
                f"The body comes at less than {BYTES_PER_S} bytes per second; send it faster."
            ) from error
        finally:
            self._left_s -= time.monotonic() - began

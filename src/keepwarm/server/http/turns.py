"""Turns at preparing requests: a share for each key, so that no key waits for another's work.

A turn begins when the body has come and ends when the engine has the request. In it the body is
parsed and checked, and the prompt is rendered and tokenised. Short bodies do not wait for long
ones. A client that goes away ends its turn.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm.config import Settings
from keepwarm.errors import Busy, KeepwarmError
from keepwarm.server.http.body import check_structure
from keepwarm.server.http.problems import problem_of, respond
from keepwarm.text.request import Receipt, Usage
from keepwarm.text.sandbox.deadline import PrepareDeadline

T = TypeVar("T")

LONG_BODY = 64 << 10  # bytes
PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
        *("/v1/messages", "/v1/messages/count_tokens", "/mcp"),
        *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *(
            f"/v1/cache/{verb}{kind}"
            for verb in ("lookup", "warm", "prefill")
            for kind in ("", "/completions", "/messages", "/responses")
        ),
    }
)

OF_AGENT = re.compile(r"/v1/agents/[^/]+/(chat/completions|(v1/)?messages|compact)")


class FairShares:
    """At most `at_once` turns at a time, `each` of one key; waiting keys take turns.

    For one event loop.
    """

    def __init__(self, at_once: int, each: int) -> None:
        self._at_once = at_once
        self._each = each
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, owner: str) -> None:
        """Wait for a turn; `give_back` ends it."""
        if owner not in self._waiting and self._may_start(owner):
            self._held[owner] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._deal()

    def _may_start(self, owner: str) -> bool:
        return self._held.total() < self._at_once and self._held[owner] < self._each

    def _deal(self) -> None:
        """Start what may start; a key that has got a turn goes to the end of the line."""
        for owner in list(self._waiting):
            turns = self._waiting[owner]
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self._may_start(owner):
                self._held[owner] += 1
                turns.popleft().set_result(None)
                self._waiting.move_to_end(owner)
            if not turns:
                del self._waiting[owner]


class ReportedAnswer(Protocol):
    """What the log says about an answer."""

    receipt: Receipt | None
    usage: Usage | None  # once it has ended


class HeldShare:
    """One turn of a key, which may be given back for a while."""

    def __init__(self, shares: FairShares, owner: str) -> None:
        self._shares = shares
        self._owner = owner
        self._is_held = True

    async def take(self) -> None:
        await self._shares.take(self._owner)
        self._is_held = True

    def give_back(self) -> None:
        if self._is_held:
            self._is_held = False
            self._shares.give_back(self._owner)


class Turn:
    """One request while it is prepared; `held` is closed when it has been answered."""

    def __init__(
        self,
        deadline: PrepareDeadline,
        threads: ThreadPoolExecutor,
        share: HeldShare,
        end: Callable[[], None],
        *,
        is_long: bool,
    ) -> None:
        self._deadline = deadline
        self._threads = threads
        self._share = share
        self._end: Callable[[], None] | None = end
        self._is_long = is_long
        self.held = ExitStack()
        self.agent: str | None = None
        self.answers: Sequence[ReportedAnswer] = ()  # for the log

    async def build(self, make: Callable[[], T]) -> T:
        """What `make` returns; not on the event loop if the body is long."""
        if not self._is_long:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments, deadline)` on a thread; it ends with the client."""
        loop = asyncio.get_running_loop()
        try:
            task = partial(work, *arguments, self._deadline)
            return await loop.run_in_executor(self._threads, task)
        except asyncio.CancelledError:
            self._deadline.cancel()
            raise

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, others prepare; the time that passes does not count."""
        self._share.give_back()
        yield
        await self._share.take()  # not after an error: the turn ends
        self._deadline.begin_again()

    def end(self) -> None:
        """The engine has the request; from here on its answer watches the client."""
        end, self._end = self._end, None
        if end is not None:
            end()


class PreparingTurns:
    """The middleware that gives every request that is prepared its turn."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._timeout_s = settings.prepare_timeout_s
        n_cpus = os.cpu_count() or 2
        at_once, each = max(2, n_cpus), max(1, n_cpus // 2)
        self._short, self._long = FairShares(at_once, each), FairShares(at_once, each)
        self._threads = ThreadPoolExecutor(2 * at_once, thread_name_prefix="keepwarm-prepare")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prepares = scope["type"] == "http" and _is_prepared(scope["path"])
        if not prepares or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(receive)
            if body is not None:
                await self._take_turn(body, scope, receive, send)
        except KeepwarmError as error:  # from before the application, which answers its own
            await respond(scope["path"], problem_of(error))(scope, receive, send)

    async def _take_turn(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope.setdefault("state", {}).get("owner", "")
        is_long = len(body) > LONG_BODY
        shares = self._long if is_long else self._short
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            if not await self._take(shares, owner, gone):
                return
        except BaseException:
            gone.cancel()
            raise

        share = HeldShare(shares, owner)

        def end() -> None:
            gone.cancel()
            share.give_back()

        deadline = PrepareDeadline(self._timeout_s)
        gone.add_done_callback(lambda task: None if task.cancelled() else deadline.cancel())
        turn = scope["state"]["turn"] = Turn(deadline, self._threads, share, end, is_long=is_long)
        try:
            await turn.build(partial(check_structure, body))
            await self._app(scope, _replay(body, receive), send)
        finally:
            turn.end()
            turn.held.close()

    async def _take(self, shares: FairShares, owner: str, gone: asyncio.Task[None]) -> bool:
        """Wait for a turn; False if the client went away meanwhile."""
        taking = asyncio.create_task(shares.take(owner))
        await asyncio.wait(
            {taking, gone}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if taking.done():
            return True
        taking.cancel()
        if gone.done():
            return False
        raise Busy(
            f"Earlier requests of this key are still being prepared after {self._timeout_s:g} s; "
            "send fewer at once, or shorter ones."
        )


def _is_prepared(path: str) -> bool:
    return path in PATHS or OF_AGENT.fullmatch(path) is not None


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if the client goes away before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

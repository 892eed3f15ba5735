"""Permits to prepare requests: fair between keys, so that no key waits for another's work.

A slot begins when the body has come and ends when the engine has the request. In it the body is
parsed and checked, and the prompt is rendered and tokenised. Short bodies do not wait for long
ones. Beside requests of other keys, a key rests after a long body, a few seconds at most: all share
one interpreter. A client that goes away ends its slot.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from types import coroutine
from typing import Any, Protocol, Self, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm.config import Settings
from keepwarm.errors import Busy, KeepwarmError
from keepwarm.server.http.body import check_structure
from keepwarm.server.http.limits import METRICS_PATH, UNTIMED, is_admin
from keepwarm.server.http.problems import ProblemResponse, problem_of
from keepwarm.telemetry.ledger import RequestRecord
from keepwarm.text.request import Arrival
from keepwarm.text.sandbox.deadline import PrepareDeadline

T = TypeVar("T")

LONG_BODY = 64 << 10  # bytes
REST = 3  # times as long as a long body has kept the interpreter, beside other keys' requests
MAX_REST_S = 2.0
MANAGEMENT_THREADS, MANAGEMENT_OF_ONE_KEY = 16, 2  # these share one interpreter with all answers
UNMANAGED = UNTIMED | {METRICS_PATH}
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

OF_AGENT = re.compile(r"/v1/agents/[^/]+/((chat/)?completions|(v1/)?messages|compact)")


class FairSemaphore:
    """At most `at_once` permits at a time, `each` of one key; waiting keys take turns.

    A key rests after its work while `rests` says so; when that changes, call `deal`. For one event
    loop.
    """

    def __init__(
        self, at_once: int, each: int, rests: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._at_once = at_once
        self._each = each
        self._rests = rests
        self._held: Counter[str] = Counter()
        self._resting: dict[str, float] = {}  # until when
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def n_held(self) -> int:
        return self._held.total()

    def permit(self, owner: str) -> Permit:
        """For `async with`, which waits for it."""
        return Permit(self, owner)

    async def acquire(self, owner: str, *, first: bool = False) -> None:
        """With `first`, ahead of the others of its key."""
        if owner not in self._waiting and self._may_start(owner):
            self._held[owner] += 1
            return
        dealt = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(owner, deque())
        (line.appendleft if first else line.append)(dealt)
        try:
            await dealt
        except asyncio.CancelledError:
            if dealt.done() and not dealt.cancelled():
                self.release(owner)
            raise

    def release(self, owner: str, worked_s: float = 0.0) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        if worked_s and self._rests(owner):
            self._rest(owner, REST * worked_s)
        self.deal()

    def _rest(self, owner: str, seconds: float) -> None:
        """Also after the rest that it has before it, if it had several permits."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        until = min(max(self._resting.get(owner, 0.0), now) + seconds, now + MAX_REST_S)
        self._resting[owner] = until
        loop.call_at(until, self._end_rest, owner, until)

    def _end_rest(self, owner: str, until: float) -> None:
        """Unless it rests longer by now. The clock is not asked: a timer may be early."""
        if self._resting.get(owner) == until:
            del self._resting[owner]
            self.deal()

    def _may_start(self, owner: str) -> bool:
        has_room = self._held.total() < self._at_once and self._held[owner] < self._each
        return has_room and not (owner in self._resting and self._rests(owner))

    def deal(self) -> None:
        """Start what may start; a key that has got a permit goes to the end of the line."""
        has_started = True
        while has_started:
            has_started = False
            for owner in list(self._waiting):
                has_started |= self._start_next(owner)

    def _start_next(self, owner: str) -> bool:
        """The next of one key; False if none may start."""
        line = self._waiting[owner]
        while line and line[0].cancelled():
            line.popleft()
        may_start = bool(line) and self._may_start(owner)
        if may_start:
            self._held[owner] += 1
            line.popleft().set_result(None)
            self._waiting.move_to_end(owner)
        if not line:
            del self._waiting[owner]
        return may_start


class Permit:
    """One permit of a key, held inside `async with` unless it is released early or paused. One that
    was held before goes to the front of its key's line: the engine may be waiting for the request.
    """

    def __init__(self, semaphore: FairSemaphore, owner: str) -> None:
        self._semaphore = semaphore
        self.owner = owner
        self.worked_s = 0.0  # since it was acquired: of the interpreter's time
        self._is_held = self._was_held = False

    async def __aenter__(self) -> Self:
        await self._acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def _acquire(self) -> None:
        await self._semaphore.acquire(self.owner, first=self._was_held)
        self._is_held = self._was_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._semaphore.release(self.owner, self.worked_s)
            self.worked_s = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the time that a thread works inside."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.worked_s += time.thread_time() - began

    @coroutine
    def counted(self, answer: Awaitable[T]) -> Generator[Any, Any, T]:
        """Awaits `answer`, and counts what its steps take on the event loop."""
        steps = answer.__await__()
        go_on: Callable[[], Any] = partial(steps.send, None)
        while True:
            try:
                with self.working():
                    awaited = go_on()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                go_on = partial(steps.send, (yield awaited))
            except BaseException as error:  # a cancellation
                go_on = partial(steps.throw, error)

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Released inside; after an error it stays so. Its work counts when it ends."""
        worked_s, self.worked_s = self.worked_s, 0.0
        self.release()
        yield
        await self._acquire()
        self.worked_s += worked_s


class ReportedAnswer(Protocol):
    """What the log says about an answer."""

    @property
    def records(self) -> Sequence[RequestRecord | None]:
        """One for each prompt; None while it runs."""


class PrepareSlot:
    """One request while it is prepared; `held` is closed when it has been answered."""

    def __init__(
        self,
        deadline: PrepareDeadline,
        threads: ThreadPoolExecutor,
        permit: Permit,
        saving: Permit,
        watcher: asyncio.Task[None],
        *,
        is_long: bool,
    ) -> None:
        """`saving` is for work that waits for the disk; `watcher` ends with the client."""
        self._deadline = deadline
        self._threads = threads
        self._permit = permit
        self._saving = saving
        self._watcher = watcher
        self._is_long = is_long
        self.held = ExitStack()
        self.agent: str | None = None
        self.answers: Sequence[ReportedAnswer] = ()  # for the log

    @property
    def owner(self) -> str:
        """Whose request it is."""
        return self._permit.owner

    async def build(self, make: Callable[[], T]) -> T:
        """What `make` returns; not on the event loop if the body is long."""
        return await self.on_thread(make) if self._is_long else make()

    async def on_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)` on a thread that only requests use; brief work also after the slot has
        ended.
        """

        def counted() -> T:
            with self._permit.working():
                return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._threads, counted)

    async def resume(self, work: Callable[..., T], *arguments: Any) -> T:
        """The same for any work after the slot has ended: with a permit again, as there is a thread
        for each, so that no key takes all threads.
        """
        async with self._permit:
            return await self.on_thread(work, *arguments)

    async def manage(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)`, which may wait for the disk, on a thread of management."""
        async with self._saving:
            return await run_in_threadpool(work, *arguments)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments, deadline)` on a thread; it ends with the client."""
        try:
            return await self.on_thread(work, *arguments, self._deadline)
        except asyncio.CancelledError:
            self._deadline.cancel()
            raise

    def check_client(self) -> None:
        """Raise if the client is gone."""
        self._deadline.check_client()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Inside, others prepare; the time that passes does not count."""
        async with self._permit.paused():
            yield
        self._deadline.begin_again()

    def end(self) -> None:
        """The engine has the request; from here on its answer watches the client."""
        self._watcher.cancel()
        self._permit.release()


def prepare_threads() -> ThreadPoolExecutor:
    """Threads that only requests use: one for each permit."""
    return ThreadPoolExecutor(2 * _n_at_once(), thread_name_prefix="keepwarm-prepare")


def _n_at_once() -> int:
    return max(2, os.cpu_count() or 2)


class PrepareLimiter:
    """The middleware that gives every request that is prepared a slot, and all others a permit for
    a thread of management.
    """

    def __init__(self, app: ASGIApp, settings: Settings, threads: ThreadPoolExecutor) -> None:
        self._app = app
        self._threads = threads
        self._timeout_s = settings.prepare_timeout_s
        at_once, each = _n_at_once(), max(1, (os.cpu_count() or 2) // 2)
        self._asking: Counter[str] = Counter()  # requests in progress, by key
        self._short = FairSemaphore(at_once, each)
        self._long = FairSemaphore(at_once, each, rests=self._is_beside_others)
        self._managing = FairSemaphore(MANAGEMENT_THREADS, MANAGEMENT_OF_ONE_KEY)
        self._saving = FairSemaphore(MANAGEMENT_THREADS // 2, 1)  # lists keep the other permits

    @property
    def n_held(self) -> int:
        """Permits in use."""
        kinds = self._short, self._long, self._managing, self._saving
        return sum(each.n_held for each in kinds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_prepared(scope):
            await self._manage(scope, receive, send)
            return
        try:
            body = await _read(receive)
            state = scope.setdefault("state", {})
            now = time.perf_counter()
            state["arrival"] = Arrival(state.get("began", now), now)
            if body is not None:
                await self._prepare(body, scope, receive, send)
        except KeepwarmError as error:  # from before the application, which answers its own
            await ProblemResponse(scope, problem_of(error))(scope, receive, send)

    async def _manage(self, scope: Scope, receive: Receive, send: Send) -> None:
        """With a permit until the answer begins: streams have threads of their own, or none."""
        owner = scope.get("state", {}).get("owner")
        # Health and pages; transfers and scrapes; what the operator waits for minutes for.
        if owner is None or scope["path"] in UNMANAGED or is_admin(scope):
            await self._app(scope, receive, send)
            return
        async with self._managing.permit(owner) as permit:
            scope["state"]["release"] = permit.release

            async def send_released(message: Message) -> None:
                permit.release()
                await send(message)

            await self._app(scope, receive, send_released)

    async def _prepare(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        owner = scope.setdefault("state", {}).get("owner", "")
        is_long = len(body) > LONG_BODY
        permit = (self._long if is_long else self._short).permit(owner)
        async with _watched(receive) as watcher, AsyncExitStack() as held:
            self._asking[owner] += 1
            held.callback(self._end_asking, owner)
            if not await self._entered(held, permit, watcher):
                return
            deadline = PrepareDeadline(self._timeout_s)
            watcher.add_done_callback(lambda task: None if task.cancelled() else deadline.cancel())
            saving = self._saving.permit(owner)
            slot = PrepareSlot(deadline, self._threads, permit, saving, watcher, is_long=is_long)
            scope["state"] |= {"slot": slot, "release": slot.end}
            with slot.held:
                await slot.build(partial(check_structure, body))
                answer = self._app(scope, _replay(body, receive), send)
                await (permit.counted(answer) if is_long else answer)

    def _end_asking(self, owner: str) -> None:
        self._asking[owner] -= 1
        if not self._asking[owner]:
            del self._asking[owner]
            self._long.deal()  # another key may be alone now, and need not rest

    def _is_beside_others(self, owner: str) -> bool:
        return any(other != owner for other in self._asking)

    async def _entered(
        self, held: AsyncExitStack, permit: Permit, watcher: asyncio.Task[None]
    ) -> bool:
        """Wait for a permit, which `held` releases; False if the client went away meanwhile."""
        entering = asyncio.create_task(held.enter_async_context(permit))
        try:
            await asyncio.wait(
                {entering, watcher}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            entering.cancel()  # NOTE: unless it is done; also when this request is cancelled here
        if entering.done():
            return True
        if watcher.done():
            return False
        raise Busy(
            f"Earlier requests of this key are still being prepared after {self._timeout_s:g} s; "
            "send fewer at once, or shorter ones."
        )


def is_prepared(scope: Scope) -> bool:
    """Whether it is a request with a prompt."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    return scope["path"] in PATHS or OF_AGENT.fullmatch(scope["path"]) is not None


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


@asynccontextmanager
async def _watched(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client goes away, or is cancelled at the end of the block."""
    watcher = asyncio.create_task(_wait_until_gone(receive))
    try:
        yield watcher
    finally:
        watcher.cancel()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

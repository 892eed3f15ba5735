"""A server with a tiny model for all kinds of clients, and a record of their requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from keepwarm import config
from keepwarm.text.request import Receipt
from tests.kit.agent_model import Asked, Leading, write_agent_checkpoint
from tests.kit.checkpoints import EOS
from tests.server.conftest import Live, serve

Calls = Mapping[str, Mapping[str, Any]]
SLACK = 16  # tokens that may be computed beside the new ones


@dataclass
class Exchange:
    """One HTTP request as it came, and how it was answered."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytearray = field(default_factory=bytearray)
    status: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


class Recorder:
    """Stands before the application and notes what passes."""

    def __init__(self, app: Any, seen: list[Exchange]) -> None:
        self.app = app
        self.seen = seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        path = scope["path"] + (f"?{query}" if query else "")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        exchange = Exchange(scope["method"], path, headers)
        self.seen.append(exchange)

        async def received() -> Any:
            event = await receive()
            exchange.body += event.get("body", b"")
            return event

        async def sent(event: Any) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
            await send(event)

        await self.app(scope, received, sent)


class Turn(NamedTuple):
    """A request of a conversation, what was new in it, and what it cost."""

    asked: Asked
    n_new: int  # tokens behind the request before and its answer
    receipt: Receipt

    @property
    def is_warm(self) -> bool:
        return self.receipt.recomputed <= self.n_new + SLACK


@dataclass(frozen=True)
class Watched:
    """A server, what came to it, and what its engine was asked."""

    live: Live
    seen: list[Exchange]
    first: list[int]  # number of the first request of the conversation that is watched

    def begin(self, calls: Calls) -> None:
        """Watch another conversation, in which these tools are called."""
        self.seen.clear()
        self.host.asked.clear()
        self.host.calls = calls
        self.first[:] = [entry.number + 1 for entry in self.host.engine.requests()[-1:]]

    @property
    def url(self) -> str:
        return self.live.url

    @property
    def host(self) -> Leading:
        assert isinstance(self.live.host, Leading)
        return self.live.host

    @property
    def refused(self) -> list[tuple[str, str, int]]:
        return [(e.method, e.path, e.status) for e in self.seen if not 200 <= e.status < 400]

    def turns(self) -> list[Turn]:
        """The requests that offer tools, each of which must go on from the one before."""
        (first,) = self.first or [0]
        entries = [entry for entry in self.host.engine.requests() if entry.number >= first]
        receipts = {entry.prompt_tokens: entry.receipt for entry in entries}
        turns, before = [], ""
        for asked in (asked for asked in self.host.asked if asked.request.tools):
            assert asked.text.startswith(before), "the beginning of the prompt has changed"
            answer, _, new = asked.text.removeprefix(before).partition(EOS)
            n_new = self._n_tokens(new if before else answer + EOS + new)
            receipt = receipts[asked.n_tokens]
            assert receipt is not None
            turns.append(Turn(asked, n_new, receipt))
            before = asked.text
        return turns

    def _n_tokens(self, text: str) -> int:
        return len(self.host.engine.model.tokenizer.encode(text, add_special_tokens=False))


Watching = Callable[..., AbstractContextManager[Watched]]


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from keepwarm.models.load import load

    checkpoint = write_agent_checkpoint(tmp_path_factory.mktemp("agent-model"))
    return load(str(checkpoint), config.load({}, home=None))


@pytest.fixture(scope="session")
def watching(agent_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Watching:
    """A function: a server whose model calls one of these tools once, then only talks."""

    @contextmanager
    def start(calls: Calls, **changed: Any) -> Iterator[Watched]:
        home: Path = tmp_path_factory.mktemp("home")
        settings = config.load({"KEEPWARM_HOME": str(home)}, **changed)
        seen: list[Exchange] = []
        with serve(
            agent_model,
            settings,
            partial(Leading, calls=calls),
            lambda app: app.add_middleware(Recorder, seen=seen),
        ) as live:
            yield Watched(live, seen, [])

    return start


@pytest.fixture(scope="session")
def shared(watching: Watching) -> Iterator[Watched]:
    """One server for all conversations that have nothing in common."""
    with watching({}) as watched:
        yield watched


@pytest.fixture
def watch(shared: Watched) -> Callable[[Calls], Watched]:
    """A function: that server, which watches a new conversation with calls of these tools."""

    def begin(calls: Calls) -> Watched:
        shared.begin(calls)
        return shared

    return begin

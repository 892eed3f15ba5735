"""A server around a tiny model that clients of all kinds can work with, and what they sent it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keepwarm import config
from keepwarm.engine.journal import Entry
from tests.kit.agent_model import Asked, Leading, write_agent_checkpoint
from tests.server.conftest import Live, serve

Calls = Mapping[str, Mapping[str, Any]]


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
            return await self.app(scope, receive, send)
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


@dataclass(frozen=True)
class Watched:
    """A server, what came to it, and what its engine was asked."""

    live: Live
    seen: list[Exchange]

    @property
    def url(self) -> str:
        return self.live.url

    @property
    def host(self) -> Leading:
        assert isinstance(self.live.host, Leading)
        return self.live.host

    @property
    def failed(self) -> list[tuple[str, str, int]]:
        """What was refused or went wrong."""
        return [(e.method, e.path, e.status) for e in self.seen if not 200 <= e.status < 300]

    def conversation(self) -> list[tuple[Asked, Entry]]:
        """Requests that offer tools, each with what the journal says of it."""
        ended = {entry.prompt_tokens: entry for entry in self.host.engine.requests()}
        return [(a, ended[a.n_tokens]) for a in self.host.asked if a.request.tools]


Watching = Callable[[Calls], AbstractContextManager[Watched]]


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from keepwarm.engine.model import load

    checkpoint = write_agent_checkpoint(tmp_path_factory.mktemp("agent-model"))
    return load(str(checkpoint), config.load({}, home=None))


@pytest.fixture(scope="session")
def watching(agent_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Watching:
    """A function: a server whose model calls one of these tools once, then only talks."""

    @contextmanager
    def start(calls: Calls) -> Iterator[Watched]:
        home: Path = tmp_path_factory.mktemp("home")
        settings = config.load({"KEEPWARM_HOME": str(home)})
        seen: list[Exchange] = []
        with serve(
            agent_model,
            settings,
            partial(Leading, calls=calls),
            lambda app: app.add_middleware(Recorder, seen=seen),
        ) as live:
            yield Watched(live, seen)

    return start

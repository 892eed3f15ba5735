"""A live server on a free port, around a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from keepwarm import config
from keepwarm.config import Settings
from keepwarm.server.models.host import EngineHost, start_engine
from keepwarm.server.models.models import Models
from keepwarm.text.request import Format, Request
from tests.kit.checkpoints import write_checkpoint
from tests.kit.idle import held_by
from tests.kit.waiting import wait_until

if TYPE_CHECKING:  # three seconds to import, for tests that use them
    from anthropic import Anthropic
    from openai import AsyncOpenAI, OpenAI

N_CONTEXT = 16384
NAME = "tiny"


@dataclass(frozen=True)
class Live:
    """A running server, seen from outside and, where a test must, from inside."""

    url: str
    host: EngineHost
    settings: Settings
    loop: asyncio.AbstractEventLoop
    models: Models
    clients: ExitStack  # closed with the server: a client that is only dropped may leak its socket

    def openai(self, **options: Any) -> OpenAI:
        from openai import OpenAI

        return self.clients.enter_context(OpenAI(**self._options(options)))

    def anthropic(self) -> Anthropic:
        from anthropic import Anthropic

        made = Anthropic(base_url=self.url, api_key="any", max_retries=0)
        return self.clients.enter_context(made)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(**self._options(options))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        usual = {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 300}
        return usual | given

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """A plain request; `body` may be bytes that no client would send."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return self._send("POST", path, headers, content)

    def patch(self, path: str, body: Any, **headers: str) -> httpx.Response:
        headers = {"Content-Type": "application/json", **headers}
        return self._send("PATCH", path, headers, json.dumps(body).encode())

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._send("GET", path, headers)

    def _send(
        self, method: str, path: str, headers: Any, content: bytes | None = None
    ) -> httpx.Response:
        """Without certificates, which take 50 ms to load."""
        options: Any = {"headers": headers, "timeout": 300, "verify": False}
        return httpx.request(method, f"{self.url}{path}", content=content, **options)


Serving = Callable[..., AbstractContextManager[Live]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), n_context=N_CONTEXT)


@pytest.fixture(scope="session")
def served_model(checkpoint: Path) -> Any:
    from keepwarm.models.load import load

    return load(str(checkpoint), config.load({}, home=None))


@pytest.fixture(scope="session")
def serving(served_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """A function: a server with these settings, for as long as the `with` lasts."""

    def start(**values: Any) -> AbstractContextManager[Live]:
        home = values.pop("home", None) or tmp_path_factory.mktemp("home")
        return serve(served_model, config.load({"KEEPWARM_HOME": str(home)}, **values))

    return start


@pytest.fixture(scope="session")
def live(serving: Serving) -> Iterator[Live]:
    """One server for all tests that do not mind each other."""
    with serving() as server:
        yield server


@contextmanager
def serve(
    model: Any,
    settings: Settings,
    host_type: Callable[..., EngineHost] = EngineHost,
    around: Callable[[Any], object] = lambda app: None,  # is given the application first
) -> Iterator[Live]:
    from keepwarm.cache.store import Store
    from keepwarm.server.app import create_app

    with Store(settings=settings) as store:
        host = host_type(start_engine(model, store, settings), NAME)
        with running(create_app(Models(host, settings), settings), settings, around) as live:
            yield live


@contextmanager
def running(
    app: Any, settings: Settings, around: Callable[[Any], object] = lambda app: None
) -> Iterator[Live]:
    """An application, served on a free port."""
    from keepwarm.server.process import DrainingServer, address_of, bind

    with bind("127.0.0.1", 0) as listening:
        around(app)
        server = DrainingServer(app, settings)
        url, loops = address_of(listening), []

        async def run() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[listening])

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            wait_until(lambda: server.started)
            models = app.state.models
            with ExitStack() as clients:
                yield Live(url, models.first, settings, loops[0], models, clients)
        finally:
            server.should_exit = True
            thread.join(300)
            assert not thread.is_alive(), _stacks(loops[0])
            assert held_by(app) == {}


def _stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where every task and every busy thread of a server that does not stop is, innermost last."""
    lines = [f"{task.get_name()}: {_awaits(task.get_coro())}" for task in asyncio.all_tasks(loop)]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        calls = traceback.extract_stack(frame)[-8:]
        if calls[-1].name not in ("_worker", "_serve"):  # those wait for work
            places = [f"{Path(call.filename).name}:{call.lineno}" for call in calls]
            lines.append(f"{names.get(number)}: {' > '.join(places)}")
    return "\n".join(lines)


def _awaits(waiting: Any) -> str:
    """The places at which a coroutine, and whatever it awaits, stands."""
    places = []
    while awaited := _frame_and_next(waiting):
        frame, waiting = awaited
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
    return " > ".join([*places, repr(waiting)])


def _frame_and_next(waiting: Any) -> tuple[FrameType, Any] | None:
    names = [("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom")]
    for one in [waiting, *gc.get_referents(waiting)]:  # `asend()` only refers to its generator
        for frame, following in names:
            if getattr(one, frame, None):
                return getattr(one, frame), getattr(one, following)
    return None


def read_vocabulary(live: Live, schema: dict[str, Any]) -> None:
    """Once, and without a request's deadline: it takes seconds on a busy machine."""
    asked = [{"role": "user", "content": "Hello"}]
    live.host.engine.prepare(Request(messages=asked, format=Format(json=True, schema=schema)))

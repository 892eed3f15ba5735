"""Downloads that a client asks for, one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

from keepwarm.errors import BadInput, Busy, Forbidden
from keepwarm.models import builtin, hub
from keepwarm.server.http.problems import ollama_body, problem_of
from keepwarm.server.http.sse import line
from keepwarm.server.models.models import Models
from keepwarm.server.models.names import plain

BEAT_S = 1.0


class Pulls:
    """What is being downloaded. A client that goes away does not end it, nor does it hold up the
    server's end: the hub's files are complete or missing."""

    def __init__(self, fetch: Callable[[str], object]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._name = ""  # of the model that is being downloaded
        self._done: Future[None] = Future()

    def start(self, name: str) -> Future[None]:
        """Done when the model is here; a second client waits for the same download."""
        with self._lock:
            if self._name == name:
                return self._done
            if self._name:
                raise Busy(f"{self._name} is being downloaded; retry when that is done.")
            self._name, self._done = name, Future()
        threading.Thread(
            target=self._run, args=(name, self._done), name="keepwarm-pull", daemon=True
        ).start()
        return self._done

    def _run(self, name: str, done: Future[None]) -> None:
        try:
            self._fetch(name)
            error: BaseException | None = None
        except BaseException as failed:
            error = failed
        with self._lock:
            self._name = ""
        done.set_result(None) if error is None else done.set_exception(error)


def checked_name(models: Models, name: str) -> str:
    """A model that may be downloaded, and loaded then; raises if it is none."""
    name = plain(name)
    if name not in builtin.BUILTINS and not hub.is_id(name):
        raise BadInput(
            f"{name!r} cannot be downloaded; use a hub id (org/name), as "
            "`keepwarm models` shows them."
        )
    if not models.may_load(name):
        raise Forbidden(
            f"Requests may not load {name!r} here; start the server with it, or name it in "
            "on_demand."
        )
    return name


async def progress(name: str, pulling: Future[None]) -> AsyncIterator[bytes]:
    """A line a second, so that the client knows that it goes on."""
    waiting = asyncio.wrap_future(pulling)
    yield line({"status": "pulling manifest"})
    while not (await asyncio.wait({waiting}, timeout=BEAT_S))[0]:
        yield line({"status": f"pulling {name}"})
    error = waiting.exception()
    yield line({"status": "success"} if error is None else ollama_body(problem_of(error)))

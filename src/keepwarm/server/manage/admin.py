"""Changing the model of a running server, which holds one model at a time.

`server.http.limits` requires the admin key for these routes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from fastapi import Depends, Request
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.cache.store import Store
from keepwarm.config import Settings
from keepwarm.errors import Busy, EngineFailed, KeepwarmError, Stopping, UnknownModel
from keepwarm.models import builtin, hub
from keepwarm.models.catalog import locate, read_config
from keepwarm.server.deprecation import renamed_to
from keepwarm.server.host import EngineHost
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.openai.shapes import OpenAIErrorOut

MAX_DRAIN_S = 3600.0

log = logging.getLogger(__name__)

router = api_router(
    prefix="/v1/admin",
    tags=["Admin"],
    responses={
        "4XX": {
            "model": OpenAIErrorOut,
            "description": "The request is invalid; nothing has changed.",
        },
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is stopping."},
    },
)


class UnloadBody(JsonInput):
    drain_s: float | None = Field(
        default=None, ge=0, le=MAX_DRAIN_S, description="Seconds for running answers to finish."
    )


class LoadBody(UnloadBody):
    model: str = Field(min_length=1, description="Built-in name, or hub id of a downloaded model.")


class ResidentOut(TypedDict):
    object: Literal["model.resident"]
    model: str | None
    previous: str | None
    before: Annotated[str | None, renamed_to("previous")]


class ModelLocation(NamedTuple):
    """A model's name in requests, and its path."""

    name: str
    path: Path


class ResidentModel:
    """Replaces the engine of a host. Its methods take seconds; call them in a thread."""

    def __init__(self, host: EngineHost, settings: Settings) -> None:
        self._host = host
        self._settings = settings
        self._store: Store | None = None  # of the engine that was closed
        self._changing = threading.Lock()

    def load(self, name: str, drain_s: float | None) -> ResidentOut:
        """Replace the model; if the new one cannot be loaded, load the previous one again."""
        with self._exclusive():
            new = self._locate(name)
            old = self._close_engine(drain_s)
            try:
                self._start(new)
            except (Exception, SystemExit) as error:
                self._reload(old)
                if isinstance(error, KeepwarmError):
                    raise
                raise EngineFailed(f"{name} could not be started ({error}).") from error
        return _out(new.name, old)

    def unload(self, drain_s: float | None) -> ResidentOut:
        """Free the model; its blocks stay on disk."""
        with self._exclusive():
            return _out(None, self._close_engine(drain_s))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise Busy("The model is already being changed; retry when that is done.")
        try:
            yield
        finally:
            self._changing.release()

    def _locate(self, name: str) -> ModelLocation:
        """Find a model that requests may name; never downloads."""
        path = self._find(name)
        if path is None and self._settings.allow_model_paths and not hub.is_id(name):
            path = locate(name, self._settings)
        if path is None:
            raise UnknownModel(
                f"Model {name!r} is not on this machine or may not be named by a request; "
                "download it with `keepwarm pull`."
            )
        if path.is_dir():
            read_config(path)
        return ModelLocation(name, path)

    def _find(self, name: str) -> Path | None:
        if name == self._settings.model:
            return locate(name, self._settings)
        if name in builtin.BUILTINS:
            path = builtin.directory(builtin.BUILTINS[name], self._settings)
            return path if path.is_dir() else None
        return hub.cached(name) if hub.is_id(name) else None

    def _close_engine(self, drain_s: float | None) -> ModelLocation | None:
        """Drain and close the engine; its weights are freed."""
        engine = self._host.take()
        if engine is None:
            return None
        location, self._store = ModelLocation(self._host.name, engine.model.path), engine.store
        engine.drain(self._settings.drain_s if drain_s is None else drain_s)
        engine.close()
        del engine
        gc.collect()  # frees the weights before the next model is loaded
        return location

    def _start(self, location: ModelLocation) -> None:
        if self._store is None:
            raise Stopping("The server is shutting down; its store is closed.")
        self._host.load(location.name, str(location.path), self._store, self._settings)

    def _reload(self, old: ModelLocation | None) -> None:
        if old is not None:
            log.warning("The new model could not be started; loading %s again.", old.name)
            self._start(old)


def _out(model: str | None, previous: ModelLocation | None) -> ResidentOut:
    name = previous and previous.name
    return {"object": "model.resident", "model": model, "previous": name, "before": name}


def _resident_of(request: Request) -> ResidentModel:
    resident: ResidentModel = request.app.state.resident
    return resident


Resident = Annotated[ResidentModel, Depends(_resident_of)]


@router.post("/load")
@router.post("/swap")
async def load_model(body: LoadBody, resident: Resident) -> ResidentOut:
    """Replace the model: drain, unload, load.

    If the new model cannot be loaded, the old one is loaded again and the error is returned.
    """
    return await asyncio.to_thread(resident.load, body.model, body.drain_s)


@router.post("/unload")
async def unload_model(body: UnloadBody, resident: Resident) -> ResidentOut:
    """Drain and unload the model; requests get a 503 until another one is loaded."""
    return await asyncio.to_thread(resident.unload, body.drain_s)

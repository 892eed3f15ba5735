"""Changing the model of a running server. One model is resident: another one takes its location.

The limits let nobody come here without the admin key.
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

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.cache.store import Store
from keepwarm.config import Settings
from keepwarm.errors import Busy, EngineFailed, KeepwarmError, Stopping, UnknownModel
from keepwarm.models import builtin, hub
from keepwarm.models.catalog import locate, read_config
from keepwarm.models.load import load
from keepwarm.server.host import EngineHost, start_engine
from keepwarm.server.http.body import JsonInput
from keepwarm.server.openai.shapes import OpenAIErrorOut

MAX_DRAIN_S = 3600.0

log = logging.getLogger(__name__)

router = APIRouter(
    prefix="/v1/admin",
    tags=["Admin"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "It cannot be done; nothing has changed."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed, or is stopping."},
    },
)


class Unload(JsonInput):
    drain_s: float | None = Field(
        default=None, ge=0, le=MAX_DRAIN_S, description="What running answers get to end."
    )


class Load(Unload):
    model: str = Field(min_length=1, description="Built-in name, or hub id that is here already.")


class ResidentOut(TypedDict):
    object: Literal["model.resident"]
    model: str | None
    before: str | None


class ModelLocation(NamedTuple):
    """A model by the name it answers to, and where it lies."""

    name: str
    path: Path


class ResidentModel:
    """Exchanges the engine of a host. Everything it does takes long; call it in a thread."""

    def __init__(self, host: EngineHost, settings: Settings) -> None:
        self._host = host
        self._settings = settings
        self._store: Store | None = None  # of the engine that was here
        self._changing = threading.Lock()

    def load(self, name: str, drain_s: float | None) -> ResidentOut:
        """Make this the model; where it cannot be loaded, the one before comes back."""
        with self._exclusive():
            new = self._locate(name)
            old = self._close_engine(drain_s)
            try:
                self._start(new)
            except Exception as error:
                self._reload(old)
                if isinstance(error, KeepwarmError):
                    raise
                raise EngineFailed(f"{name} could not be started ({error}).") from error
        return _resident(new.name, old)

    def unload(self, drain_s: float | None) -> ResidentOut:
        """Let go of the model; its blocks stay on disk."""
        with self._exclusive():
            return _resident(None, self._close_engine(drain_s))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise Busy("The model is being changed already; ask again when that is done.")
        try:
            yield
        finally:
            self._changing.release()

    def _locate(self, name: str) -> ModelLocation:
        """Where a model lies that a request may name; nothing is downloaded for it."""
        path = self._find(name)
        if path is None and self._settings.allow_model_paths and not hub.is_id(name):
            path = locate(name, self._settings)
        if path is None:
            raise UnknownModel(
                f"There is no model {name!r} on this machine that a request may name; "
                "fetch it with `keepwarm pull`."
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
        """Drain and close the engine that is here; its weights are free afterwards."""
        engine = self._host.take()
        if engine is None:
            return None
        location, self._store = ModelLocation(self._host.name, engine.model.path), engine.store
        engine.drain(self._settings.drain_s if drain_s is None else drain_s)
        engine.close()
        del engine
        gc.collect()  # before the next model's weights come in: one is resident, not two
        return location

    def _start(self, location: ModelLocation) -> None:
        if self._store is None:
            raise Stopping("The server is shutting down; its store is closed.")
        model = load(str(location.path), self._settings)
        self._host.put(start_engine(model, self._store, self._settings), location.name)

    def _reload(self, old: ModelLocation | None) -> None:
        if old is not None:
            log.warning("The new model could not be started; %s comes back.", old.name)
            self._start(old)


def _resident(now: str | None, before: ModelLocation | None) -> ResidentOut:
    return {"object": "model.resident", "model": now, "before": before and before.name}


def _resident_of(request: Request) -> ResidentModel:
    resident: ResidentModel = request.app.state.resident
    return resident


Model = Annotated[ResidentModel, Depends(_resident_of)]


@router.post("/load")
@router.post("/swap")
async def load_model(body: Load, resident: Model) -> ResidentOut:
    """Load a model in location of the one that is here: drain, unload, load.

    Where the new one cannot be loaded, the old one is loaded again and the error is told.
    """
    return await asyncio.to_thread(resident.load, body.model, body.drain_s)


@router.post("/unload")
async def unload_model(body: Unload, resident: Model) -> ResidentOut:
    """Drain and let go of the model; requests get a 503 until another one is loaded."""
    return await asyncio.to_thread(resident.unload, body.drain_s)

"""Changing which models of a running server are loaded.

`server.http.limits` requires the admin key for these routes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from fastapi import Depends, Request
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.config import Settings
from keepwarm.errors import Busy, KeepwarmError, UnknownModel
from keepwarm.models.catalog import find, locate, read_config
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.models.models import Models, configured, key_of, plain
from keepwarm.server.models.slots import Slot

MAX_DRAIN_S = 3600.0

log = logging.getLogger(__name__)

router = api_router(prefix="/v1/admin", tags=["Admin"])


class UnloadBody(JsonInput):
    drain_s: float | None = Field(
        default=None, ge=0, le=MAX_DRAIN_S, description="Seconds for running answers to finish."
    )


class NamedUnloadBody(UnloadBody):
    model: str | None = Field(default=None, description="One of the server's; default: the first.")


class LoadBody(UnloadBody):
    model: str = Field(min_length=1, description="Built-in name, or hub id of a downloaded model.")
    pinned: bool | None = Field(
        default=None, description="Whether it stays loaded; if given, no model is replaced."
    )


class ResidentOut(TypedDict):
    object: Literal["model.resident"]
    model: str | None
    previous: str | None


class ModelLocation(NamedTuple):
    """A model, and what requests call it."""

    name: str
    path: Path | None
    names: list[str]  # this and its others


class ResidentModel:
    """Changes which models are loaded. Its methods take seconds; call them in a thread."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models = models
        self._slots = models.slots
        self._settings = settings

    def load(self, name: str, drain_s: float | None, pinned: bool | None = None) -> ResidentOut:
        """Load one of the server's models; any other replaces the first one, unless it is pinned.

        If that cannot be loaded, the previous one is loaded again.
        """
        with self._exclusive():
            if pinned is not None:
                return self._pin(name, pinned)
            slot = self._models.known(name)
            if slot is None or (slot is self._models.default and slot.host.loaded is not None):
                return self._replace(self._locate(slot.host.name if slot else name), drain_s)
            self._load(slot)
            return _out(name, None)

    def _pin(self, name: str, pinned: bool) -> ResidentOut:
        """A pinned one is loaded, beside the others."""
        slot = self._models.known(name) or self._models.find_on_demand(plain(name))
        if slot is None:
            raise self._models.unknown(name)
        if pinned:
            self._load(slot)
        slot.pinned = pinned
        return _out(name if slot.host.loaded else None, None)

    def unload(self, drain_s: float | None, name: str | None = None) -> ResidentOut:
        """Free a model, the first one by default; its blocks stay on disk."""
        slot = self._models.default if name is None else self._models.known(name)
        if slot is None:
            raise self._models.unknown(str(name))
        with self._exclusive():
            return _out(None, self._unload(slot, drain_s))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._slots.changing.acquire(blocking=False):
            raise Busy("The model is already being changed; retry when that is done.")
        try:
            yield
        finally:
            self._slots.changing.release()

    def _locate(self, name: str) -> ModelLocation:
        """Find a model that requests may name; never downloads."""
        path = self._find(name) or self._models.on_demand.find(name)
        if path is None:
            raise UnknownModel(
                f"Model {name!r} is not on this machine or may not be named by a request; "
                "download it with `keepwarm pull`."
            )
        if path.is_dir():
            read_config(path)
        return ModelLocation(name, path, self._names(name))

    def _names(self, name: str) -> list[str]:
        """All that the settings give the model of this name."""
        sources = {model.name: key_of(model.source) for model in configured(self._settings)}
        return [each for each in sources if sources[each] == sources.get(name)] or [name]

    def _find(self, name: str) -> Path | None:
        for model in configured(self._settings):
            if model.name == name:
                return locate(model.source, self._settings)
        return find(name, self._settings)

    def _replace(self, new: ModelLocation, drain_s: float | None) -> ResidentOut:
        default = self._models.default
        old = self._unload(default, drain_s)
        try:
            self._put(default, new)
        except KeepwarmError:
            if old is not None:
                log.warning("The new model could not be started; loading %s again.", old.name)
                self._put(default, old)
            raise
        return _out(new.name, old)

    def _put(self, slot: Slot, location: ModelLocation) -> None:
        slot.host.name, slot.path, slot.names = location
        self._load(slot)

    def _load(self, slot: Slot) -> None:
        if slot.host.loaded is None:
            self._slots.load(slot)
        self._slots.offer(slot)

    def _unload(self, slot: Slot, drain_s: float | None) -> ModelLocation | None:
        """Until it is loaded again, requests are told that it is not."""
        slot.is_offered = False
        loaded = slot.host.loaded is not None
        location = ModelLocation(slot.host.name, slot.path, slot.names) if loaded else None
        self._slots.unload(slot, self._settings.drain_s if drain_s is None else drain_s)
        return location


def _out(model: str | None, previous: ModelLocation | None) -> ResidentOut:
    return {"object": "model.resident", "model": model, "previous": previous and previous.name}


def _resident_of(request: Request) -> ResidentModel:
    resident: ResidentModel = request.app.state.resident
    return resident


Resident = Annotated[ResidentModel, Depends(_resident_of)]


@router.post("/load")
def load_model(body: LoadBody, resident: Resident) -> ResidentOut:
    """Load one of the server's models. Any other replaces the first: drain, unload, load.

    If the new model cannot be loaded, the old one is loaded again and the error is returned.
    """
    return resident.load(body.model, body.drain_s, body.pinned)


@router.post("/unload")
def unload_model(body: NamedUnloadBody, resident: Resident) -> ResidentOut:
    """Drain and unload a model; requests to it get a 503 until one is loaded."""
    return resident.unload(body.drain_s, body.model)

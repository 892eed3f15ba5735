"""One request to an API, on its way to the engine: its model, its permit, its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Request

from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.request_fields import (
    PromptBody,
    request_fields,
    settings_of,
)
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from keepwarm.text import request as engine_request
from keepwarm.text.volatile import scrub_request, select_rules

SCRUB_HEADER = "x-keepwarm-scrub"  # changes the server's setting for one request


async def models_of(request: Request) -> Models:
    """A coroutine: FastAPI runs a plain function in a thread, for every request."""
    models: Models = request.app.state.models
    return models


class ApiCall:
    """One request to an API, on its way to the engine."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.settings = settings_of(request)
        self.models: Models = request.app.state.models
        self.slot: PrepareSlot = request.state.slot
        self._rules = select_rules(self.settings.scrub, request.headers.get(SCRUB_HEADER, ""))
        self._fields: engine_request.Request | None = None

    async def host(self, model: str | None, *, to_embed: bool = False) -> EngineHost:
        """The model with this name, loaded."""
        return await self.models.use(model, self.slot, to_embed=to_embed)

    def fields(self, body: PromptBody, hint: str | None = None) -> engine_request.Request:
        """Found once: a conversation that is shortened is built many times, from one body."""
        if self._fields is None:
            self._fields = request_fields(self.request, body.keepwarm, hint, body)
        return self._fields

    def scrubbed(self, request: engine_request.Request) -> engine_request.Request:
        return scrub_request(request, self._rules)

    async def prepare(
        self, model: str | None, make: Callable[[], engine_request.Request]
    ) -> tuple[EngineHost, engine_request.Request]:
        """The model, and the request for it that `make` returns, scrubbed."""
        host = await self.host(model)
        return host, await self.slot.build(lambda: self.scrubbed(make()))


async def _call(request: Request) -> ApiCall:
    return ApiCall(request)


Call = Annotated[ApiCall, Depends(_call)]
Served = Annotated[Models, Depends(models_of)]

"""Liveness and readiness."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from keepwarm.errors import Stopping
from keepwarm.server.http.body import api_router
from keepwarm.server.http.problems import OpenAIErrorOut
from keepwarm.server.http.request_fields import Served

router = api_router(prefix="/health", tags=["Health"])

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": OpenAIErrorOut, "description": "Not ready."}
}


class HealthOut(TypedDict):
    status: Literal["ok"]


@router.get("/live")
async def live() -> HealthOut:
    """200 while the process responds."""
    return {"status": "ok"}


@router.get("/ready", responses=UNREADY)
@router.get("", responses=UNREADY)
async def ready(models: Served) -> HealthOut:
    """200 while the engine accepts requests; 503 while it is down, draining or being replaced.

    While a model is loaded, the message says what is being done and how far.
    """
    if not models.ready:
        _ = models.engine  # raises, with the reason, if there is none
        raise Stopping("The engine is not accepting requests; retry later.")
    return {"status": "ok"}

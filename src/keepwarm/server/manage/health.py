"""Whether the process lives, and whether it can answer."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from keepwarm.errors import Stopping
from keepwarm.server.http.request_fields import Host
from keepwarm.server.openai.shapes import OpenAIErrorOut

router = APIRouter(prefix="/health", tags=["Health"])

UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": OpenAIErrorOut, "description": "Not now."}
}


class HealthOut(TypedDict):
    status: Literal["ok"]


@router.get("/live")
async def live() -> HealthOut:
    """The process answers."""
    return {"status": "ok"}


@router.get("/ready", responses=UNREADY)
@router.get("", responses=UNREADY)
async def ready(host: Host) -> HealthOut:
    """The engine answers too; 503 while it does not run, drains, or is being exchanged."""
    if not host.ready:
        raise Stopping("The engine is not running, or takes no requests now; ask again later.")
    return {"status": "ok"}

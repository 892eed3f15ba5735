"""Whether the process lives, and whether it can answer."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from keepwarm.errors import Stopping
from keepwarm.server.wire import Host

router = APIRouter(prefix="/health", tags=["Health"])


class HealthOut(TypedDict):
    status: Literal["ok"]


@router.get("/live")
async def live() -> HealthOut:
    """The process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(host: Host) -> HealthOut:
    """The engine answers too; 503 while it does not."""
    if not host.ready:
        raise Stopping("The engine is not running; the server's log says why.")
    return {"status": "ok"}

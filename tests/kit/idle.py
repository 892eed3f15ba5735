"""What an application holds for its requests: nothing, once they have ended."""

from __future__ import annotations

from typing import Any

from keepwarm.server.http.limits import Limits
from keepwarm.server.http.permits import PrepareLimiter


def held_by(app: Any) -> dict[str, int]:
    """Permits, leases, places in the queue and bytes of bodies that are held; a name for each."""
    limits, limiter = (_middleware(app, kind) for kind in (Limits, PrepareLimiter))
    leases = {f"leases of {slot.host.name}": slot.n_leases for slot in app.state.models.slots.all}
    waiting = {
        f"waiting for {slot.host.name}": slot.n_waiting for slot in app.state.models.slots.all
    }
    held = {"permits": limiter.n_held, **limits.held, **leases, **waiting}
    return {name: n for name, n in held.items() if n}


def _middleware(app: Any, kind: type) -> Any:
    layer = app.middleware_stack
    while not isinstance(layer, kind):
        layer = layer._app if hasattr(layer, "_app") else layer.app
    return layer

"""One line for every request, with its id; the same id is in the answer's header.

Numbers and names only: no prompt, no answer, no query string, no key.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm import __version__
from keepwarm.config import Settings
from keepwarm.server.http.logs import log_fields
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.problems import problem_of, respond
from keepwarm.server.http.request_fields import tenant_agent_id
from keepwarm.store.counts import TIERS, CountBook

if TYPE_CHECKING:
    from keepwarm.cache.restore.writing import WriteStats

LOG = logging.getLogger("keepwarm.requests")
SERVER_LOG = logging.getLogger("keepwarm.server")

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_HEADERS = (REQUEST_ID_HEADER, "request-id")  # the second is Anthropic's
GIVEN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
POLLED = ("/health", "/metrics", "/v1/dashboard", "/dashboard")  # by supervisors and open pages
MAX_PATH = 200
LEFT = 499  # the client went away before there was a status


class RecentLines:
    """The last lines of requests that were answered, for the dashboard."""

    def __init__(self, n_lines: int = 500) -> None:
        self._lines: deque[tuple[str, str, str]] = deque(maxlen=n_lines)

    def add(self, tenant: str, request_id: str, line: str) -> None:
        self._lines.append((tenant, request_id, line))

    def by_request(self) -> dict[tuple[str, str], str]:
        """By tenant and id; a client may have used an id twice, then the last."""
        return {(tenant, request_id): line for tenant, request_id, line in list(self._lines)}


class RequestLog:
    """Gives every request its id, and logs it when it has ended."""

    def __init__(self, app: ASGIApp, recent: RecentLines) -> None:
        self._app = app
        self._recent = recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), LEFT
        state = scope.setdefault("state", {})
        state["request_id"] = _id_of(Headers(scope=scope))

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name in REQUEST_ID_HEADERS:
                    MutableHeaders(scope=message)[name] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status != LEFT:
                raise
            SERVER_LOG.error("%s %s failed", scope["method"], _path(scope), exc_info=error)
            await respond(scope["path"], problem_of(error))(scope, receive, send_with_id)
        finally:
            line = _log(scope, status, time.perf_counter() - began)
            if "slot" in state:
                self._recent.add(state.get("tenant", ""), state["request_id"], line)


def _id_of(headers: Headers) -> str:
    """The client's own, if it is one; a proxy may have given it."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if GIVEN_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"


def _log(scope: Scope, status: int, seconds: float) -> str:
    """Without a known caller only some lines a minute: anyone can cause them."""
    state = scope["state"]
    fields: dict[str, Any] = {
        "id": state["request_id"],
        "key": state.get("key_name", ""),
        "method": scope["method"],
        "path": _path(scope),
        "status": status,
        **_answered(state.get("slot"), state.get("tenant", "")),
        "total_ms": round(1000 * seconds, 1),
    }
    is_polled = scope["method"] == "GET" and scope["path"].startswith(POLLED)
    level = logging.DEBUG if is_polled else logging.INFO
    return log_fields(LOG, level, fields, limited="owner" not in state)


def _path(scope: Scope) -> str:
    """As it was sent: encoded, so that it fits into a line."""
    sent: bytes = scope.get("raw_path") or scope["path"].encode()
    return sent.decode("ascii", "backslashreplace")[:MAX_PATH]


def _answered(slot: PrepareSlot | None, tenant: str) -> dict[str, Any]:
    """Tokens by place and the time to the first token, of all answers to a request."""
    from keepwarm.engine.answer import sum_receipts  # loads MLX

    if slot is None:
        return {}
    agent = (slot.agent or "").removeprefix(tenant_agent_id(tenant, ""))
    receipts = [answer.receipt for answer in slot.answers if answer.receipt is not None]
    if not receipts:
        return {"agent": agent}
    receipt, usages = sum_receipts(receipts), [answer.usage for answer in slot.answers]
    ended = [usage for usage in usages if usage is not None]
    return {
        "agent": agent,
        "prompt_tokens": receipt.prompt_tokens,
        **dict.fromkeys(TIERS, 0),
        **receipt.reused,
        "computed": receipt.recomputed,
        "answer_tokens": sum(usage.completion_tokens for usage in ended),
        "first_token_ms": min((usage.ttft_ms for usage in ended), default=None),
        "finished": len(ended) == len(usages),
        **({"repeated_calls": n} if (n := len(receipt.repeated_calls)) else {}),
    }


def log_start(model: str, address: str, settings: Settings) -> None:
    log_fields(
        SERVER_LOG,
        logging.INFO,
        {
            "event": "started",
            "version": __version__,
            "model": model,
            "address": address,
            "store": str(settings.store),
            **_rates(settings),
        },
    )


def log_drain(n_unfinished: int, drain_s: float, writes: WriteStats | None) -> None:
    """What a stopping server waits for, if for anything: requests, then blocks on their way to
    disk. A second signal ends the wait.
    """
    waits: dict[str, Any] = {}
    if n_unfinished:
        waits = {"unfinished_requests": n_unfinished, "up_to_s": round(drain_s, 1)}
    elif writes is not None and writes.queued_blocks:
        waits = {"unsaved_blocks": writes.queued_blocks, "unsaved_bytes": writes.queued_bytes}
    if waits:
        hint = {"hint": "press Ctrl-C again to stop at once"}
        log_fields(SERVER_LOG, logging.INFO, {"event": "draining", **waits, **hint})


def log_stop(settings: Settings) -> None:
    log_fields(SERVER_LOG, logging.INFO, {"event": "stopped", **_rates(settings)})


def _rates(settings: Settings) -> dict[str, Any]:
    figures = CountBook(settings.store).total().figures()
    return {name: figures[name] for name in ("requests", "hit_rate", "hit_rate_from_turn_2")}

"""The server's log, on standard error: requests, and what failed and where.

The message of an exception from another library may quote its input, which may be a prompt, so it
is left out. What anyone can repeat is not logged each time: the log does not fill the disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm import __version__
from keepwarm.config import Settings
from keepwarm.server.http.keys import tenant_agent_id
from keepwarm.server.http.permits import PrepareSlot, is_prepared
from keepwarm.server.http.problems import Problem, ProblemResponse, problem_of
from keepwarm.store.counts import TIERS, CountsFile
from keepwarm.telemetry.ledger import Ledger, RequestRecord

if TYPE_CHECKING:
    from keepwarm.cache.restore.writing import WriteStats

LINES_PER_MINUTE = 20  # from one place in the code
FIELDS, UNLIMITED = "keepwarm_fields", "keepwarm_unlimited"  # attributes of a record
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Raised: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def log_to_stderr(settings: Settings) -> None:
    """Log in the format of the settings, unless the embedding program has configured logging.

    The level is that of Keepwarm's own lines; of other libraries only warnings are logged.
    """
    handler = logging.StreamHandler()
    as_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else RedactingFormatter(LINE))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("keepwarm").setLevel(settings.log_level.upper())


def log_fields(
    logger: logging.Logger, level: int, fields: dict[str, Any], *, limited: bool = False
) -> str:
    """A line of fields: `name=value` in text, members of the object in JSON; returns the text.

    A `limited` one is dropped if there are too many like it.
    """
    text = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
    logger.log(level, "%s", text, extra={FIELDS: fields, UNLIMITED: not limited})
    return text


def _word(value: object) -> str:
    """A value without spaces, or in quotes."""
    text = "-" if value is None or value == "" else str(value)
    return json.dumps(text) if re.search(r'[\s"=]', text) else text


class RedactingFormatter(logging.Formatter):
    """Shows class and traceback of an exception and its causes, but no messages.

    A message is one line: what it quotes, as the error of another server, may hold anything.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = super().formatMessage(record)
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)

    def formatException(self, ei: Raised) -> str:  # noqa: N802, named by the standard library
        return "\n".join(_describe(error) for error in _causes(ei[1]))


class JsonFormatter(RedactingFormatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, None) or {"message": record.getMessage()}
        made = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{made}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RepeatLimit(logging.Filter):
    """Drops lines of one place in the code beyond so many a minute, and says later how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}  # minute's begin, lines since

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, UNLIMITED, False):
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        began, lines = self._counts.get(place, (now, 0))
        if now - began >= 60:
            self._tell(record, lines - LINES_PER_MINUTE)
            began, lines = now, 0
        self._counts[place] = began, lines + 1
        return lines < LINES_PER_MINUTE

    def _tell(self, record: logging.LogRecord, n_dropped: int) -> None:
        if n_dropped > 0:
            record.msg = f"{record.getMessage()} ({n_dropped} lines like this were left out)"
            record.args = None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _describe(error: BaseException) -> str:
    kind = type(error)
    where = "".join(traceback.format_tb(error.__traceback__))
    return f"{kind.__module__}.{kind.__qualname__}, raised at (innermost last)\n{where}".rstrip()


LOG = logging.getLogger("keepwarm.requests")
SERVER_LOG = logging.getLogger("keepwarm.server")

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_HEADERS = (REQUEST_ID_HEADER, "request-id")  # the second is Anthropic's
GIVEN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
POLLED = ("/health", "/metrics", "/v1/dashboard", "/dashboard")  # by supervisors and open pages
MAX_PATH = 200
LEFT = 499  # the client went away before there was a status
ENDINGS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


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
    """Gives every request its id; logs it and counts it, by path and status, when it has ended.

    A prompt that did not get to the engine, which books all others, is booked here.
    """

    def __init__(
        self, app: ASGIApp, recent: RecentLines, count: Callable[[str, int], None], ledger: Ledger
    ) -> None:
        self._app = app
        self._recent = recent
        self._count = count
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), LEFT
        state = scope.setdefault("state", {})
        state["request_id"], state["began"] = _id_of(Headers(scope=scope)), began

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                for name in REQUEST_ID_HEADERS:
                    headers[name] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except BaseException as error:  # native code that panics raises no Exception
            if status != LEFT or isinstance(error, ENDINGS):
                raise
            SERVER_LOG.error("%s %s failed", scope["method"], _path(scope), exc_info=error)
            await ProblemResponse(scope, problem_of(error))(scope, receive, send_with_id)
        finally:
            self._count(scope["path"], status)
            seconds = time.perf_counter() - began
            line = _log(scope, status, seconds)
            if "slot" in state:
                self._recent.add(state.get("tenant", ""), state["request_id"], line)
            if _is_refused(scope, status):
                number = next(self._ledger.numbers)
                self._ledger.append(_refusal(number, state, status, seconds))


def _is_refused(scope: Scope, status: int) -> bool:
    """Without a known caller it is not booked: anyone could displace what is in the journal."""
    slot: PrepareSlot | None = scope["state"].get("slot")
    has_failed = status >= 400 and status != LEFT and not (slot and slot.answers)
    return has_failed and "owner" in scope["state"] and is_prepared(scope)


def _refusal(number: int, state: dict[str, Any], status: int, seconds: float) -> RequestRecord:
    problem: Problem | None = state.get("problem")
    slot: PrepareSlot | None = state.get("slot")
    return RequestRecord(
        number=number,
        seconds=round(seconds, 3),
        tenant=state["tenant"],
        agent=slot.agent if slot else None,
        model="",
        state="refused",
        prompt_tokens=problem.overflow.n_tokens if problem and problem.overflow else 0,
        answer_tokens=0,
        receipt=None,
        error=problem.message if problem else "",
        status=status,
        ended=time.time(),
        request_id=state["request_id"],
    )


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
    """Tokens by place and the time to the first token, as they were: also of one cut short."""
    from keepwarm.engine.answer import sum_receipts  # loads MLX

    if slot is None:
        return {}
    agent = (slot.agent or "").removeprefix(tenant_agent_id(tenant, ""))
    records = [record for answer in slot.answers for record in answer.records]
    ended = [record for record in records if record is not None]
    receipts = [record.receipt for record in ended if record.receipt is not None]
    if not receipts:
        return {"agent": agent}
    receipt = sum_receipts(receipts)
    first = min(ended, key=lambda record: record.ttft_ms or math.inf)
    return {
        "agent": agent,
        "prompt_tokens": receipt.prompt_tokens,
        **dict.fromkeys(TIERS, 0),
        **receipt.reused,
        "computed": receipt.recomputed,
        "answer_tokens": sum(record.answer_tokens for record in ended),
        "first_token_ms": first.ttft_ms,
        **{f"{name}_ms": ms for name, ms in first.phases_ms.items()},
        "finished": all(record is not None and record.state == "done" for record in records),
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
    figures = CountsFile(settings.store).total().figures()
    return {name: figures[name] for name in ("requests", "hit_rate", "hit_rate_from_turn_2")}

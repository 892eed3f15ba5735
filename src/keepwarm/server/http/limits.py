"""Access checks and limits. Pure ASGI: streams and disconnects pass through unchanged.

Checked in this order: Host and Origin, API key, rate, announced size, concurrency. Then the route
reads the body, and its bytes are counted as they come.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm.config import Settings
from keepwarm.errors import BadInput, Busy, Forbidden, KeepwarmError, Overloaded, SlowBody, TooLarge
from keepwarm.server.http.keys import ApiKeys
from keepwarm.server.http.problems import ProblemResponse, problem_of

BODIES = 8  # of the largest size, in memory at once
BODIES_OF_ONE_KEY = 4
BYTES_PER_S = 16 << 10  # a client that is slower for long is given up
OPEN_PATHS = ("/health", "/docs", "/openapi.json", "/dashboard")  # hold nothing about prompts
OPEN_BODY_BYTES = 1024  # nothing there reads a body
ADMIN_PATH = "/v1/admin"
METRICS_PATH = "/metrics"
UPLOADS = frozenset({"/v1/agents/import"})  # files, streamed and never held in memory whole
UNTIMED = UPLOADS | {"/api/pull", "/v1/cache/verify"}  # take as long as network or disk do
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PASSING_SCHEMES = frozenset({"vscode-webview"})  # of origins that are new with every window
MAX_SHOWN = 100  # characters of a name in an error
TOO_LATE = "The server did not begin to answer within its time limit; retry in a few seconds."
_ANY_HOST = "[A-Za-z0-9.-]*"


def check_binding(settings: Settings) -> None:
    """Refuse to listen on other than loopback addresses without a readable API key."""
    if not settings.read_api_keys() and not is_loopback(settings.host):
        raise BadInput(
            f"Listening on {settings.host} lets other machines connect, but no API key is set; "
            "set KEEPWARM_API_KEYS or --api-key-file, or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin_pattern(settings: Settings) -> re.Pattern[str]:
    """What `allowed_origins` names. A `*` stands for part of a host, or a port; alone, for all."""
    names = settings.listed("allowed_origins")
    parts = [".*" if name == "*" else re.escape(name).replace(r"\*", _ANY_HOST) for name in names]
    return re.compile(f"(?i){'|'.join(parts) or '(?!)'}")


class OriginCheck:
    """Rejects web pages of other origins, including DNS rebinding."""

    def __init__(self, settings: Settings) -> None:
        named = {name.lower() for name in (settings.host, *settings.listed("allowed_hosts"))}
        self._hosts = LOCAL_NAMES | named if is_loopback(settings.host) else None
        self._origins = origin_pattern(settings)

    def check(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "").lower()
        if self._hosts is not None and _hostname(host) not in self._hosts:
            name = _hostname(host)[:MAX_SHOWN]
            raise Forbidden(
                f"The Host header {name!r} does not name this machine; use localhost, or start the "
                f"server with KEEPWARM_ALLOWED_HOSTS={shlex.quote(name)} (docs/security.md)."
            )
        origin = headers.get("origin")
        if origin is None or self._origins.fullmatch(origin) or (host and _host_of(origin) == host):
            return
        line = shlex.quote(_to_allow(origin))
        raise Forbidden(
            "Web pages and apps of this origin are not allowed; start the server with "
            f"KEEPWARM_ALLOWED_ORIGINS={line}, or '*' for all (docs/security.md)."
        )


def _to_allow(origin: str) -> str:
    """What to allow for this origin; an editor's web views have other names every time."""
    scheme, separator, _ = origin.partition("://")
    return f"{scheme}{separator}*" if scheme in PASSING_SCHEMES else origin[:MAX_SHOWN]


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _host_of(origin: str) -> str:
    return origin.lower().partition("://")[2]


class RateLimit:
    """Requests per minute for each key: a token bucket."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # requests left, as of when

    def take(self, owner: str) -> None:
        if not self._per_minute:
            return
        now, a_second = self._clock(), self._per_minute / 60
        left, when = self._buckets.get(owner, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - when) * a_second)
        if left < 1:
            self._buckets[owner] = left, now
            raise Busy(
                f"This API key may send {self._per_minute} requests per minute; wait, then retry.",
                (1 - left) / a_second,
            )
        self._buckets[owner] = left - 1, now


class SharedLimit:
    """What may be in use at once: by all keys, and by one key; with what is said beyond it."""

    def __init__(self, limit: int, each: int, all_used: str, own_used: str) -> None:
        self._limit = limit
        self._each = each
        self._all_used = all_used
        self._own_used = own_used
        self._used: Counter[str] = Counter()

    @property
    def n_used(self) -> int:
        return self._used.total()

    def take(self, owner: str, n: int = 1) -> None:
        if self._used.total() + n > self._limit:
            raise Busy(self._all_used)
        if self._used[owner] + n > self._each:
            raise Busy(self._own_used)
        self._used[owner] += n

    def release(self, owner: str, n: int = 1) -> None:
        self._used[owner] -= n
        if not self._used[owner]:
            del self._used[owner]

    @contextmanager
    def one_more(self, owner: str) -> Iterator[None]:
        self.take(owner)
        try:
            yield
        finally:
            self.release(owner)


def concurrency_limit(limit: int, each: int) -> SharedLimit:
    """Requests running or waiting at once."""
    return SharedLimit(
        limit,
        each,
        f"{limit} requests are in progress, which is the limit; retry shortly.",
        f"This API key has {each} requests in progress, its limit; wait for one.",
    )


class Meter(NamedTuple):
    """How often, and how many at once, a key may send requests of one kind."""

    rate: RateLimit
    concurrency: SharedLimit

    @classmethod
    def of(cls, settings: Settings) -> Self:
        concurrency = concurrency_limit(settings.max_queue, settings.max_concurrency)
        return cls(RateLimit(settings.rate_per_minute), concurrency)


def body_budget(max_body_bytes: int) -> SharedLimit:
    """Bytes of the bodies of unfinished requests."""
    return SharedLimit(
        BODIES * max_body_bytes,
        BODIES_OF_ONE_KEY * max_body_bytes,
        "The bodies of all requests in progress are too large; retry shortly.",
        "The bodies of this key's requests in progress are too large; wait for one.",
    )


class BodyShare:
    """One request's part of the budget."""

    def __init__(self, budget: SharedLimit, owner: str, max_bytes: int) -> None:
        self._budget = budget
        self._owner = owner
        self._max_bytes = max_bytes
        self._n_bytes = 0

    def reserve(self, n_bytes: int) -> None:
        """Make room for a body of this size, or of at least this size; raises if there is none."""
        if n_bytes > self._max_bytes:
            raise TooLarge(f"The body is larger than {self._max_bytes} bytes; send a smaller one.")
        if n_bytes > self._n_bytes:
            self._budget.take(self._owner, n_bytes - self._n_bytes)
            self._n_bytes = n_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.release(self._owner, self._n_bytes)
        self._n_bytes = 0


class BodyReader:
    """The `receive` of one request. `reserve` is called with the size so far, for every part."""

    def __init__(self, receive: Receive, timeout_s: float, reserve: Callable[[int], None]) -> None:
        self._receive = receive
        self._reserve = reserve
        self._left_s = timeout_s  # that the client may keep us waiting
        self._n_bytes = 0
        self._ended = False

    async def __call__(self) -> Message:
        if self._ended:
            return await self._receive()  # only the client's leaving is left to come
        message = await self._next()
        n_bytes = len(message.get("body", b""))
        self._n_bytes += n_bytes
        self._left_s += n_bytes / BYTES_PER_S
        self._ended = not message.get("more_body", False)
        self._reserve(self._n_bytes)
        return message

    async def _next(self) -> Message:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                return await self._receive()
        except TimeoutError as error:
            raise SlowBody(
                f"The body comes at less than {BYTES_PER_S} bytes per second; send it faster."
            ) from error
        finally:
            self._left_s -= time.monotonic() - began


class Limits:
    """The middleware that applies all limits and sets `request.state.tenant` and `.admin`."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: ApiKeys) -> None:
        self._app = app
        self._origins = OriginCheck(settings)
        self._keys = keys
        self._asking, self._managing = Meter.of(settings), Meter.of(settings)
        self._bodies = body_budget(settings.max_body_bytes)
        self._settings = settings

    @property
    def held(self) -> dict[str, int]:
        """What requests in progress use, by its name."""
        return {
            "requests": self._asking.concurrency.n_used,
            "management": self._managing.concurrency.n_used,
            "body bytes": self._bodies.n_used,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            try:
                reader = self._admit(scope, receive, held)
            except KeepwarmError as error:
                held.close()  # a refused request has no share of what is limited
                await ProblemResponse(scope, problem_of(error))(scope, receive, send)
                return
            await self._answer(scope, reader, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._answer_s(scope)) as deadline:
                await self._app(scope, receive, send_noted)
        except TimeoutError:
            if not deadline.expired():
                raise
            if not has_begun:  # otherwise the connection ends with an unfinished answer
                await ProblemResponse(scope, problem_of(Overloaded(TOO_LATE)))(scope, receive, send)

    def _admit(self, scope: Scope, receive: Receive, held: ExitStack) -> BodyReader:
        """What reads the body; raises if the request is refused. Nothing is read here."""
        headers = Headers(scope=scope)
        self._origins.check(headers)
        owner = "" if _is_open(scope) else self._identify(scope, headers)
        reserve = self._reserve(scope, headers, owner, held)
        if _is_metered(scope):
            held.enter_context(self._meter(scope).concurrency.one_more(owner))
        return BodyReader(receive, self._settings.client_timeout_s, reserve)

    def _identify(self, scope: Scope, headers: Headers) -> str:
        """Whose request it is; raises if it is refused."""
        caller = self._keys.check(headers)
        if is_admin(scope) and not caller.admin:
            raise Forbidden(
                "This endpoint needs the admin key; set KEEPWARM_ADMIN_KEY and send that key."
            )
        if _is_metered(scope):
            self._meter(scope).rate.take(caller.owner)
        scope.setdefault("state", {}).update(
            tenant=caller.tenant, admin=caller.admin, owner=caller.owner, key_name=caller.name
        )
        return caller.owner

    def _meter(self, scope: Scope) -> Meter:
        """Lists and dashboards that are polled leave a key's requests for tokens alone; what
        cancels one needs no place beside it.
        """
        asks = scope["method"] == "POST" and not scope["path"].endswith("/cancel")
        return self._asking if asks else self._managing

    def _reserve(
        self, scope: Scope, headers: Headers, owner: str, held: ExitStack
    ) -> Callable[[int], None]:
        """How the bytes of the body are counted; raises if it announces too many."""
        if scope["path"] in UPLOADS:
            return lambda _: None  # counted where they are written
        max_bytes = OPEN_BODY_BYTES if _is_open(scope) else self._settings.max_body_bytes
        share = held.enter_context(BodyShare(self._bodies, owner, max_bytes))
        length = headers.get("content-length", "")
        share.reserve(int(length) if length.isdecimal() else 0)
        return share.reserve

    def _answer_s(self, scope: Scope) -> float | None:
        """Seconds until a slow reader loses its slot; the engine has ended its answer before."""
        limited = self._settings.request_timeout_s and _is_metered(scope)
        if not limited or scope["method"] != "POST" or scope["path"] in UNTIMED:
            return None
        return self._settings.request_timeout_s + self._settings.client_timeout_s


def _is_open(scope: Scope) -> bool:
    return bool(scope["path"] == "/" or scope["path"].startswith(OPEN_PATHS))


def is_admin(scope: Scope) -> bool:
    return bool(scope["path"] == ADMIN_PATH or scope["path"].startswith(f"{ADMIN_PATH}/"))


def _is_metered(scope: Scope) -> bool:
    """Whether the limits apply: to all but the admin's requests, health and metrics."""
    return not (is_admin(scope) or _is_open(scope) or scope["path"] == METRICS_PATH)

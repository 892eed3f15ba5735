"""Who may come in, how much at once, how often. Pure ASGI: streams and disconnects pass untouched.

In this order: the names a browser may call us by, the key, the rate, the size, the room.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepwarm.config import Settings
from keepwarm.errors import BadInput, Busy, Forbidden, KeepwarmError, Refused, TooLarge
from keepwarm.server.http.problems import problem_of, respond

OPEN = ("/health", "/docs", "/openapi.json", "/dashboard")  # tell nothing of anybody's prompts
ADMIN = "/v1/admin"
UPLOADS = frozenset({"/v1/agents/import"})  # files, read as they come and never held whole
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def check_binding(settings: Settings) -> None:
    """Refuse to listen beyond this machine without a key, or with keys that cannot be read."""
    if not settings.read_api_keys() and not is_loopback(settings.host):
        raise BadInput(
            f"Listening on {settings.host} lets other machines in, and no key is set; "
            "set KEEPWARM_API_KEYS or --api-key-file, or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Pass(NamedTuple):
    """What a key is good for."""

    tenant: str  # whose blocks are found
    admin: bool
    owner: str  # whose requests are counted


class Doors:
    """Keeps web pages of other origins out, also those that make their name point here."""

    def __init__(self, settings: Settings) -> None:
        named = {settings.host, *_listed(settings.allowed_hosts)}
        self._hosts = LOCAL_NAMES | named if is_loopback(settings.host) else None
        self._origins = frozenset(_listed(settings.allowed_origins))

    def check(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if self._hosts is not None and _hostname(host) not in self._hosts:
            raise Forbidden(
                f"The Host header names {_hostname(host)!r}, which is not this machine; call "
                "localhost, or set KEEPWARM_ALLOWED_HOSTS."
            )
        origin = headers.get("origin")
        if origin is None or origin in self._origins or (host and _place(origin) == host):
            return
        raise Forbidden("Web pages of another origin may not call; set KEEPWARM_ALLOWED_ORIGINS.")


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str:
    return origin.partition("://")[2]


class Keys:
    """The keys that are accepted, as digests; comparing takes the same time for any wrong one."""

    def __init__(self, settings: Settings) -> None:
        self._keys = [_digest(key) for key in settings.read_api_keys()]
        self._admin = _digest(settings.admin_key) if settings.admin_key else None
        self._shared = settings.share_cache or not self._keys  # an admin alone has no tenant

    def check(self, headers: Mapping[str, str]) -> Pass:
        """Whom the request comes from, or why it is refused."""
        given = _digest(_given(headers))
        admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not self._keys and not admin:
            return Pass("", False, "")
        if not admin and not any(matches):
            raise Refused(
                "The API key is missing or wrong; send it as Authorization: Bearer or x-api-key."
            )
        owner = given.hex()[:16]
        return Pass("" if self._shared else owner, admin, owner)


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Rates:
    """So many requests a minute for each key: a bucket that fills all the time."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # requests left, when

    def take(self, owner: str) -> None:
        if not self._per_minute:
            return
        now, a_second = self._clock(), self._per_minute / 60
        left, when = self._buckets.get(owner, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - when) * a_second)
        if left < 1:
            self._buckets[owner] = left, now
            raise Busy(
                f"This key may ask {self._per_minute} times a minute; wait a little.",
                (1 - left) / a_second,
            )
        self._buckets[owner] = left - 1, now


class Room:
    """How many requests may be under way at once, waiting ones included: of all, and of one key."""

    def __init__(self, limit: int, each: int) -> None:
        self._limit = limit
        self._each = each
        self._used: Counter[str] = Counter()

    def enter(self, owner: str) -> None:
        if self._used.total() >= self._limit:
            raise Busy(f"{self._limit} requests are under way and no more fit; ask again shortly.")
        if self._used[owner] >= self._each:
            raise Busy(f"This key has {self._each} requests under way already; await one of them.")
        self._used[owner] += 1

    def leave(self, owner: str) -> None:
        self._used[owner] -= 1


class Limits:
    """The middleware that applies all of them; `request.state` then has `tenant` and `admin`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._doors = Doors(settings)
        self._keys = Keys(settings)
        self._rates = Rates(settings.rate_per_minute)
        self._room = Room(settings.max_queue, settings.max_concurrency)
        self._max_bytes = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        costs = _costs(scope)
        try:
            owner = self._admit(scope, costs)
            if scope["path"] not in UPLOADS:
                receive = await bounded(receive, Headers(scope=scope), self._max_bytes)
            if costs:
                self._room.enter(owner)
        except KeepwarmError as error:
            await respond(scope["path"], problem_of(error))(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if costs:
                self._room.leave(owner)

    def _admit(self, scope: Scope, costs: bool) -> str:
        """Whose request it is, or why it is refused."""
        headers = Headers(scope=scope)
        self._doors.check(headers)
        if scope["path"] == "/" or scope["path"].startswith(OPEN):
            return ""
        allowed = self._keys.check(headers)
        if _is_admin(scope) and not allowed.admin:
            raise Forbidden("This needs the admin key; set KEEPWARM_ADMIN_KEY and send that key.")
        if costs:
            self._rates.take(allowed.owner)
        scope.setdefault("state", {}).update(tenant=allowed.tenant, admin=allowed.admin)
        return allowed.owner


def _is_admin(scope: Scope) -> bool:
    return bool(scope["path"] == ADMIN or scope["path"].startswith(f"{ADMIN}/"))


def _costs(scope: Scope) -> bool:
    """Whether it may make the engine work; who runs the server is never told to wait."""
    posted = scope["method"] == "POST" and scope["path"].startswith("/v1/")
    return posted and not _is_admin(scope)


async def bounded(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> Receive:
    """Read the body, up to the limit; what is given back tells it once and then goes on."""
    length = headers.get("content-length", "0")
    size, chunks, more = 0, [], True
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return _told_once(message, receive)
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        more = message.get("more_body", False)
        if size > max_bytes:
            raise _too_large(max_bytes)
    body = {"type": "http.request", "body": b"".join(chunks), "more_body": False}
    return _told_once(body, receive)


def _told_once(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def told() -> Message:
        return waiting.pop() if waiting else await receive()

    return told


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The body is larger than {max_bytes} bytes; send less in one request.")

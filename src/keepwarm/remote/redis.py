"""Blobs in Redis or Valkey: one key each, and a sorted set of the names in each folder.

Commands name one key each, so that these may lie on different nodes behind a proxy, and go out in
one round trip. Nothing walks the whole keyspace.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote

from keepwarm.concurrency import AbandonableExecutor, CallDeadline, CallError
from keepwarm.errors import BadInput
from keepwarm.remote.backend import Listed, Looked, Near, Take, at_most, check_name
from keepwarm.remote.resp import Command, Reply, RespConnection

T = TypeVar("T")
PORT = 6379
MAX_IDLE = 8  # connections that are kept
NEIGHBOURS = b"8"  # names on each side of a place in a folder's order
PAGE = 1000  # names of a folder in one reply
AFTER_ORDER = b"!"  # less than any hex digit: what an order begins with comes before it
BEFORE_SIZE = b"/"  # is in no word
MAX_DIGITS = 12  # of a size


class RedisAddress(NamedTuple):
    host: str
    port: int
    user: str = ""
    database: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, url: SplitResult) -> RedisAddress:
        try:
            database = int(url.path.strip("/") or 0)
            address = url.hostname or "", url.port or PORT, unquote(url.username or ""), database
        except ValueError as error:
            raise BadInput(
                f"{url.geturl()!r} is not a Redis address; use redis://host:6379/0."
            ) from error
        return cls(*address, tls=url.scheme == "rediss")


class RedisBackend:
    """One server, or whatever answers under its name. For all threads."""

    in_batches = True
    is_distant = False

    def __init__(self, address: RedisAddress, password: str = "") -> None:
        self._address = address
        self._password = password
        self._idle: list[RespConnection] = []
        self._max_idle = MAX_IDLE
        self._lock = threading.Lock()
        self._hands = AbandonableExecutor(1)  # a name service may hang

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int | None]:
        return self.look(names, (), timeout_s).sizes

    def look(self, names: Sequence[str], places: Sequence[Near], timeout_s: float) -> Looked:
        commands: list[Command] = [[b"STRLEN", _key(name)] for name in names]
        for place in places:
            commands += _neighbours(place)
        replies = self._call(commands, timeout_s)
        sizes, members = replies[: len(names)], replies[len(names) :]
        listed = [
            [*_listed(place.folder, below), *_listed(place.folder, above)]
            for place, below, above in zip(places, members[::2], members[1::2], strict=True)
        ]
        return Looked([_whole(size) or None for size in sizes], listed)

    def read(
        self,
        name: str,
        take: Take,
        timeout_s: float,
        start: int = 0,
        n_bytes: int | None = None,
    ) -> memoryview | None:
        command = [b"GET", _key(name)]
        if start or n_bytes is not None:
            end = -1 if n_bytes is None else start + n_bytes - 1
            command = [b"GETRANGE", _key(name), b"%d" % start, b"%d" % end]
            take = take if n_bytes is None else at_most(n_bytes, take)
        reply = self._call([command], timeout_s, take)[0]
        return reply if isinstance(reply, memoryview) and len(reply) else None

    def fetch(
        self, name: str, take: Take, use: Callable[[memoryview], T], timeout_s: float
    ) -> T | None:
        memory = self.read(name, take, timeout_s)
        return None if memory is None else use(memory)

    def put(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        timeout_s: float,
        order: bytes = b"",
        replace: bool = False,
    ) -> bool:
        folder, _, last = check_name(name).rpartition("/")
        size = b"%d" % sum(memoryview(piece).nbytes for piece in pieces)
        commands: list[Command] = [
            [b"SET", _key(name), list(pieces), *(() if replace else (b"NX",))],
            _unlist(folder, order, last),  # it may have had another size
            [b"ZADD", _folder(folder), b"0", _member(order, last) + size],
        ]
        stored, _, listed = self._call(commands, timeout_s, or_full=True)
        return stored == b"OK" and not isinstance(listed, CallError)

    def touch(self, names: Sequence[str], timeout_s: float) -> None:
        self._call([[b"TOUCH", _key(name)] for name in names], timeout_s)

    def delete(self, blobs: Sequence[Listed], timeout_s: float) -> None:
        commands: list[Command] = []
        for name, order, *_ in blobs:
            folder, _, last = name.rpartition("/")
            commands.append([b"UNLINK", _key(name)])
            commands.append(_unlist(folder, order, last))
        self._call(commands, timeout_s)

    def list_names(self, folder: str, timeout_s: float, near: bytes | None = b"") -> list[Listed]:
        if near is not None:
            return self.look((), [Near(folder, near)], timeout_s).listed[0]
        return list(_listed(folder, self._all_members(_folder(folder), CallDeadline(timeout_s))))

    def _all_members(self, key: bytes, deadline: CallDeadline) -> list[Reply]:
        """In pages: a server answers nobody else while it makes a reply."""
        members: list[Reply] = []
        while True:
            first, last = b"%d" % len(members), b"%d" % (len(members) + PAGE - 1)
            (page,) = self._call([[b"ZRANGE", key, first, last]], deadline.left_s())
            members += page if isinstance(page, list) else []
            if not isinstance(page, list) or len(page) < PAGE:
                return members

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._max_idle = 0  # those in use are closed after it
        for connection in idle:
            connection.close()
        self._hands.close()

    def _call(
        self,
        commands: Sequence[Command],
        timeout_s: float,
        take: Take | None = None,
        or_full: bool = False,
    ) -> list[Reply]:
        """The replies; raises the first that is an error, unless it says that memory is full."""
        if not commands:
            return []
        replies = self._exchange(commands, CallDeadline(timeout_s), take)
        for reply in replies:
            if isinstance(reply, CallError) and not (or_full and str(reply).startswith("OOM")):
                raise reply
        return replies

    def _exchange(
        self, commands: Sequence[Command], deadline: CallDeadline, take: Take | None
    ) -> list[Reply]:
        """On a connection that is there, or on a new one if the server has closed those."""
        while (connection := self._take_idle()) is not None:
            try:
                return self._exchange_on(connection, commands, deadline, take)
            except CallError:
                deadline.left_s()
        return self._exchange_on(self._connect(deadline), commands, deadline, take)

    def _exchange_on(
        self,
        connection: RespConnection,
        commands: Sequence[Command],
        deadline: CallDeadline,
        take: Take | None,
    ) -> list[Reply]:
        try:
            replies = connection.exchange(commands, deadline, take)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
            n_surplus = max(0, len(self._idle) - self._max_idle)
            surplus, self._idle = self._idle[:n_surplus], self._idle[n_surplus:]
        for other in surplus:
            other.close()
        return replies

    def _take_idle(self) -> RespConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self, deadline: CallDeadline) -> RespConnection:
        sock = self._open_socket(deadline)
        try:
            connection = RespConnection(sock)
            for reply in connection.exchange(self._greeting(), deadline):
                if isinstance(reply, CallError):
                    raise reply
        except BaseException:
            sock.close()
            raise
        return connection

    def _greeting(self) -> list[Command]:
        user, database = self._address.user, self._address.database
        commands: list[Command] = []
        if self._password:
            names = [user.encode()] if user else []
            commands.append([b"AUTH", *names, self._password.encode()])
        if database:
            commands.append([b"SELECT", b"%d" % database])
        return [*commands, [b"PING"]]

    def _open_socket(self, deadline: CallDeadline) -> socket.socket:
        host, port = self._address.host, self._address.port

        def find() -> str:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])

        found = self._hands.run(find, deadline.left_s())
        try:
            sock = socket.create_connection((found, port), deadline.left_s())
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._secured(sock, deadline) if self._address.tls else sock
        except OSError as error:
            raise CallError(f"{host}:{port}: {error}") from error

    def _secured(self, sock: socket.socket, deadline: CallDeadline) -> socket.socket:
        try:
            sock.settimeout(deadline.left_s())
            context = ssl.create_default_context()
            return context.wrap_socket(sock, server_hostname=self._address.host)
        except BaseException:
            sock.close()
            raise


def _key(name: str) -> bytes:
    return b"keepwarm:" + check_name(name).encode()


def _folder(folder: str) -> bytes:
    return _key(folder) + b"/"


def _member(order: bytes, last: str) -> bytes:
    """Without the size at its end."""
    return order.hex().encode() + AFTER_ORDER + last.encode() + BEFORE_SIZE


def _unlist(folder: str, order: bytes, last: str) -> Command:
    member = _member(order, last)
    return [b"ZREMRANGEBYLEX", _folder(folder), b"[" + member, b"[" + member + b"\xff"]


def _neighbours(place: Near) -> list[Command]:
    """What is below a place in a folder's order, with what is exactly there, and what is above."""
    key, limit = _folder(place.folder), (b"LIMIT", b"0", NEIGHBOURS)
    end = place.order.hex().encode() + AFTER_ORDER + b"\xff"
    return [
        [b"ZREVRANGEBYLEX", key, b"[" + end, b"-", *limit],
        [b"ZRANGEBYLEX", key, b"(" + end, b"+", *limit],
    ]


def _listed(folder: str, members: Reply) -> Iterator[Listed]:
    """What members say; whatever else stands there is left out."""
    for member in members if isinstance(members, list) else ():
        if isinstance(member, bytes):
            order, _, rest = member.partition(AFTER_ORDER)
            last, _, size = rest.partition(BEFORE_SIZE)
            try:
                name = f"{folder}/{check_name(last.decode())}"
                yield Listed(name, bytes.fromhex(order.decode()), int(size[:MAX_DIGITS]))
            except (ValueError, BadInput):
                continue


def _whole(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise CallError("the server does not speak the protocol of Redis")
    return reply

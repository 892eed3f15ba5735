"""Blobs in Redis or Valkey: one key each, and a sorted set of the names in each folder.

Commands name one key each, so that these may lie on different nodes behind a proxy, and go out in
one round trip. Nothing walks the whole keyspace.

The client is our own: values of many megabytes are received straight into the memory they are
wanted in, which costs a third of the processor time of redis-py, and a call ends at its deadline
wherever it is, in the middle of a value too.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, TypeVar
from urllib.parse import SplitResult, unquote

from keepwarm.concurrency import AbandonableExecutor, BusyError, CallDeadline, CallError
from keepwarm.errors import BadInput
from keepwarm.files import MAX_PIECES, drop_written
from keepwarm.remote.backend import BESIDE, Backend, FolderRange, Listed, Take, at_most, check_name

T = TypeVar("T")
Piece: TypeAlias = bytes | memoryview
Word: TypeAlias = Piece | list[Piece]
Command: TypeAlias = Sequence[Word]
Reply: TypeAlias = "int | bytes | memoryview | list[Reply] | CallError | None"
PORT = 6379
CHUNK = 1 << 16
MAX_LINE = 1 << 16
SMALL = 1 << 12  # words up to this size are joined
MAX_BULK = 1 << 16  # of a reply that nobody gave memory for
MAX_DEPTH, MAX_ITEMS = 4, 1 << 12
MAX_IDLE = 8  # connections that are kept
PAGE = 1000  # names of a folder in one reply
ADDRESS_S = 1.0  # to connect to one of the addresses of a name
CONNECT_S = 3.0  # without any new connection are a failure
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}
MOVED = "READONLY", "LOADING", "MASTERDOWN", "NOAUTH"  # a new connection may lead elsewhere
ELSEWHERE = "MOVED ", "ASK "  # of a cluster: other shards have other keys
NOT_WRITABLE = "OOM", "READONLY", "MISCONF", "NOPERM", "NOREPLICAS"


class RedisAddress(NamedTuple):
    host: str
    port: int
    user: str = ""
    database: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, url: SplitResult) -> RedisAddress:
        """Raises ValueError if the port or the database is no number."""
        database, user = int(url.path.strip("/") or 0), unquote(url.username or "")
        return cls(url.hostname or "", url.port or PORT, user, database, url.scheme == "rediss")


class RedisBackend(Backend):
    """One server, or whatever answers under its name. For all threads."""

    in_batches = True
    is_distant = False

    def __init__(self, address: RedisAddress, password: str = "") -> None:
        self._address = address
        self._password = password
        self._idle: list[RespConnection] = []
        self._max_idle = MAX_IDLE
        self._lock = threading.Lock()
        self._connecting_since = 0.0  # 0 after a success
        self._context = ssl.create_default_context() if address.tls else None
        self._workers = AbandonableExecutor()  # a name service may hang

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int | None]:
        replies = self._call([[b"STRLEN", _key(name)] for name in names], timeout_s)
        return [_whole(size) or None for size in replies]

    def look(self, ranges: Sequence[FolderRange], timeout_s: float) -> list[list[Listed]]:
        """In two round trips: the list of a folder may outlive what it names, which Redis evicts.
        Such names are taken from it.
        """
        deadline = CallDeadline(timeout_s)
        commands = [command for one in ranges for command in _members_of(one)]
        replies = self._call(commands, deadline.left_s())
        own, others = replies[::2], replies[1::2]
        found = [
            list(dict.fromkeys([*_names(one.folder, a), *_names(one.folder, b)]))
            for one, a, b in zip(ranges, own, others, strict=True)
        ]
        names = [name for some in found for name in some]
        sizes = dict(zip(names, self.sizes(names, deadline.left_s()), strict=True))
        stale = [name.rpartition("/") for name, size in sizes.items() if not size]
        gone: list[Command] = [
            [b"ZREM", _folder(folder), last.encode()] for folder, _, last in stale
        ]
        if gone:
            with suppress(CallError):  # the answer is known, and tidying up is not worth losing it
                self._call(gone, deadline.left_s(), or_refused=True)
        return [[Listed(n, size) for n in some if (size := sizes[n])] for some in found]

    def fetch(
        self,
        name: str,
        take: Take,
        use: Callable[[memoryview], T],
        timeout_s: float,
        n_bytes: int | None = None,
    ) -> T | None:
        command = [b"GET", _key(name)]
        if n_bytes is not None:
            command = [b"GETRANGE", _key(name), b"0", b"%d" % (n_bytes - 1)]
            take = at_most(n_bytes, take)
        reply = self._call([command], timeout_s, take)[0]
        return use(reply) if isinstance(reply, memoryview) and len(reply) else None

    def put(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        timeout_s: float,
        replace: bool = False,
    ) -> bool:
        folder, _, last = check_name(name).rpartition("/")
        commands: list[Command] = [
            [b"SET", _key(name), list(pieces), *(() if replace else (b"NX",))],
            [b"ZADD", _folder(folder), b"0", last.encode()],
        ]
        stored, listed = self._call(commands, timeout_s, or_refused=True)
        return stored == b"OK" and not isinstance(listed, CallError)

    def touch(self, names: Sequence[str], timeout_s: float) -> None:
        """The lists that have these names too, last: who deletes needs them."""
        folders = dict.fromkeys(name.rpartition("/")[0] for name in names)
        keys = [*map(_key, names), *map(_folder, folders)]
        self._call([[b"TOUCH", key] for key in keys], timeout_s)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        commands: list[Command] = []
        for name in names:
            folder, _, last = name.rpartition("/")
            commands.append([b"UNLINK", _key(name)])
            commands.append([b"ZREM", _folder(folder), last.encode()])
        self._call(commands, timeout_s)

    def list_names(self, folder: str, timeout_s: float) -> list[Listed]:
        members = self._all_members(_folder(folder), CallDeadline(timeout_s))
        return [Listed(name) for name in _names(folder, members)]

    def list_page(self, folder: str, timeout_s: float, after: str = "") -> list[Listed]:
        """All at once, from all keys of the server: only people ask for that."""
        deadline, prefix = CallDeadline(timeout_s), _folder(folder)
        found: list[Listed] = []
        cursor = b"0"
        while not after:
            match = b"MATCH", prefix + b"*", b"COUNT", b"%d" % PAGE, b"TYPE", b"string"
            (reply,) = self._call([[b"SCAN", cursor, *match]], deadline.left_s())
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[0], bytes):
                raise CallError("the server does not speak the protocol of Redis")
            cursor, keys = reply[0], reply[1] if isinstance(reply[1], list) else []
            within: list[Reply] = [key[len(prefix) :] for key in keys if isinstance(key, bytes)]
            found += self._measured(list(_names(folder, within)), deadline)
            if cursor == b"0":
                break
        return found

    def _measured(self, names: Sequence[str], deadline: CallDeadline) -> list[Listed]:
        """Bytes and last uses, by commands that are no uses themselves."""
        words = (b"MEMORY", b"USAGE"), (b"OBJECT", b"IDLETIME")
        commands = [[*two, _key(name)] for name in names for two in words]
        replies = self._exchange(commands, deadline, None) if commands else []
        found: list[Listed] = []
        for name, n_bytes, idle_s in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(n_bytes, CallError):
                raise n_bytes
            used = time.time() - idle_s if isinstance(idle_s, int) else 0.0  # LFU does not tell
            found += [Listed(name, n_bytes, used)] if isinstance(n_bytes, int) else []  # else gone
        return found

    def _all_members(self, key: bytes, deadline: CallDeadline) -> list[Reply]:
        """In pages: a server answers nobody else while it makes a reply."""
        members: list[Reply] = []
        after = b"-"
        while True:  # by name: ranks change when others delete
            command = [b"ZRANGEBYLEX", key, after, b"+", b"LIMIT", b"0", b"%d" % PAGE]
            (page,) = self._call([command], deadline.left_s())
            members += page if isinstance(page, list) else []
            if not isinstance(page, list) or len(page) < PAGE or not isinstance(page[-1], bytes):
                return members
            after = b"(" + page[-1]

    def close(self) -> None:
        self._max_idle = 0  # those in use are closed after it
        self._drop_idle()
        self._workers.close()

    def _call(
        self,
        commands: Sequence[Command],
        timeout_s: float,
        take: Take | None = None,
        or_refused: bool = False,
    ) -> list[Reply]:
        """The replies; raises the first that is an error, unless it says that nothing is written
        there now.
        """
        if not commands:
            return []
        replies = self._exchange(commands, CallDeadline(timeout_s), take)
        if any(_begins(reply, ELSEWHERE) for reply in replies):
            raise BadInput(
                "It is a Redis Cluster with more than one shard, which is not supported; name a "
                "single Redis or Valkey, or a proxy that speaks for the cluster."
            )
        for reply in replies:
            if isinstance(reply, CallError) and not (or_refused and _begins(reply, NOT_WRITABLE)):
                raise reply
        return replies

    def _exchange(
        self, commands: Sequence[Command], deadline: CallDeadline, take: Take | None
    ) -> list[Reply]:
        """On a connection that is there. If that fails, or leads to a server that was replaced, all
        others do, and a new one is made: then the question has all of its time.
        """
        if (connection := self._take_idle()) is not None:
            with suppress(CallError):
                replies = self._exchange_on(connection, commands, deadline, take)
                if not any(_begins(reply, MOVED) for reply in replies):
                    return replies
            self._drop_idle()
            deadline.left_s()
        connection = self._connected(deadline)
        return self._exchange_on(connection, commands, CallDeadline(deadline.timeout_s), take)

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
            self._drop_idle()
            raise
        self._keep(connection)
        return replies

    def _keep(self, connection: RespConnection) -> None:
        with self._lock:
            is_kept = len(self._idle) < self._max_idle
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def _take_idle(self) -> RespConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_quiet():
                return connection
            connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connected(self, deadline: CallDeadline) -> RespConnection:
        """A new connection, made on another thread: when it comes too late it is kept for the next
        call. That is no failure of the server, unless none comes for a while.
        """
        with self._lock:
            self._connecting_since = since = self._connecting_since or time.monotonic()
        try:
            for _ in range(MAX_IDLE):  # other calls may take new ones first
                if (connection := self._take_idle()) is not None:
                    return connection
                self._workers.run(self._connect, deadline.left_s())
            raise CallError(f"{self._address.host}:{self._address.port} closes new connections")
        except CallError as error:
            if deadline.is_over and time.monotonic() < since + CONNECT_S:
                raise BusyError(f"not connected: {error}") from error
            raise

    def _connect(self) -> None:
        address = self._address
        try:
            sock = socket.create_connection((address.host, address.port), ADDRESS_S)
            try:
                self._keep(RespConnection(self._prepared(sock), self._greeting()))
            except BaseException:
                sock.close()
                raise
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
            raise CallError(f"{address.host}:{address.port}: {error}") from error
        self._connecting_since = 0.0

    def _prepared(self, sock: socket.socket) -> socket.socket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # systems have different ones
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if self._context is None:
            return sock
        return self._context.wrap_socket(sock, server_hostname=self._address.host)

    def _greeting(self) -> list[Command]:
        user, database = self._address.user, self._address.database
        commands: list[Command] = []
        if self._password:
            names = [user.encode()] if user else []
            commands.append([b"AUTH", *names, self._password.encode()])
        if database:
            commands.append([b"SELECT", b"%d" % database])
        return commands


def _key(name: str) -> bytes:
    return b"keepwarm:" + check_name(name).encode()


def _folder(folder: str) -> bytes:
    return _key(folder) + b"/"


def _members_of(wanted: FolderRange) -> list[Command]:
    """Members that begin with the stem, and the first of all."""
    key, stem = _folder(wanted.folder), wanted.stem.encode()
    return [
        [b"ZRANGEBYLEX", key, b"[" + stem, b"[" + stem + b"\xff", b"LIMIT", b"0", b"%d" % BESIDE],
        [b"ZRANGE", key, b"0", b"%d" % (BESIDE - 1)],
    ]


def _names(folder: str, members: Reply) -> Iterator[str]:
    """What members say; whatever else stands there is left out."""
    for member in members if isinstance(members, list) else ():
        if isinstance(member, bytes):
            with suppress(ValueError, BadInput):
                yield f"{folder}/{check_name(member.decode())}"


def _begins(reply: Reply, words: tuple[str, ...]) -> bool:
    return isinstance(reply, CallError) and str(reply).startswith(words)


def _whole(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise CallError("the server does not speak the protocol of Redis")
    return reply


class RespConnection:
    """The protocol: commands in a row, replies in a row. For one thread at a time; after a
    CallError it is of no more use.
    """

    def __init__(self, sock: socket.socket, greeting: Sequence[Command] = ()) -> None:
        """The greeting goes out with the first commands, which saves a round trip."""
        self._socket = sock
        self._greeting = greeting
        self._received = bytearray()
        self._at = 0  # what was received before is used up

    def exchange(
        self, commands: Sequence[Command], deadline: CallDeadline, take: Take | None = None
    ) -> list[Reply]:
        """Send commands and wait for the reply to each. An error that the server replies with is
        returned in its place. Values that are replies themselves go into memory from `take`.
        """
        try:
            greeting, self._greeting = self._greeting, ()
            self._send([*greeting, *commands], deadline)
            for reply in [self._reply(deadline) for _ in greeting]:
                if isinstance(reply, CallError):
                    raise reply
            return [self._reply(deadline, take) for _ in commands]
        except TimeoutError as error:
            raise CallError(f"no answer within {deadline.timeout_s * 1000:.0f} ms") from error
        except (OSError, ValueError) as error:
            raise CallError(str(error)) from error

    def is_quiet(self) -> bool:
        """Whether it is open and nothing waits to be read: that would be taken for the next reply,
        and every later one for the reply to the command before.
        """
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return self._at == len(self._received)
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._socket.close()

    def _send(self, commands: Sequence[Command], deadline: CallDeadline) -> None:
        pieces = list(_encode(commands))
        while pieces:
            self._socket.settimeout(deadline.left_s())
            drop_written(pieces, _send_some(self._socket, pieces[:MAX_PIECES]))

    def _reply(self, deadline: CallDeadline, take: Take | None = None, depth: int = 0) -> Reply:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return CallError(rest.decode(errors="replace"))
        number = int(rest)
        if kind == b":" or number == -1:
            return number if kind == b":" else None
        if kind == b"$":
            return self._bulk(number, deadline, take)
        if kind != b"*" or depth == MAX_DEPTH or number > MAX_ITEMS:
            raise ValueError("the server does not speak the protocol of Redis")
        return [self._reply(deadline, None, depth + 1) for _ in range(number)]

    def _bulk(self, n_bytes: int, deadline: CallDeadline, take: Take | None) -> bytes | memoryview:
        if take is None and not 0 <= n_bytes <= MAX_BULK:
            raise ValueError(f"the server sends {n_bytes} bytes")
        memory = memoryview(bytearray(n_bytes)) if take is None else take(n_bytes)
        self._fill(memory, deadline)
        end = bytearray(2)
        self._fill(memoryview(end), deadline)
        if end != b"\r\n":
            raise ValueError("the server does not speak the protocol of Redis")
        return bytes(memory) if take is None else memory

    def _fill(self, memory: memoryview, deadline: CallDeadline) -> None:
        n_here = min(len(memory), len(self._received) - self._at)
        memory[:n_here] = self._received[self._at : self._at + n_here]
        self._at += n_here
        rest = memory[n_here:]
        while rest:
            self._socket.settimeout(deadline.left_s())
            n_read = self._socket.recv_into(rest)
            if not n_read:
                raise ConnectionError("the server closed the connection")
            rest = rest[n_read:]

    def _line(self, deadline: CallDeadline) -> bytes:
        while (end := self._received.find(b"\r\n", self._at)) < 0:
            if len(self._received) - self._at > MAX_LINE:
                raise ValueError("the server does not speak the protocol of Redis")
            self._socket.settimeout(deadline.left_s())
            more = self._socket.recv(CHUNK)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._received = self._received[self._at :] + more
            self._at = 0
        line = bytes(self._received[self._at : end])
        self._at = end + 2
        return line


def _send_some(sock: socket.socket, pieces: Sequence[Piece]) -> int:
    """How much was sent. TLS sends one piece at a time."""
    if isinstance(sock, ssl.SSLSocket):
        return sock.send(pieces[0])
    return sock.sendmsg(pieces)


def _encode(commands: Iterable[Command]) -> Iterator[Piece]:
    """The bytes to send; large values are not copied."""
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for word in command:
            if isinstance(word, bytes) and len(word) <= SMALL:  # most, and this is the fastest
                small += b"$%d\r\n%b\r\n" % (len(word), word)
                continue
            pieces = [memoryview(p).cast("B") for p in (word if isinstance(word, list) else [word])]
            small += b"$%d\r\n" % sum(map(len, pieces))
            for piece in pieces:
                if len(piece) <= SMALL:
                    small += piece
                    continue
                yield bytes(small)
                yield piece
                small.clear()
            small += b"\r\n"
    yield bytes(small)

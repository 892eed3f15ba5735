"""Clients that send or read slowly, or too much: what they hold is bounded, others go on.

One server for all: two keys, bodies of at most 4 MiB, a second for slow clients.
"""

import http.client
import json
import resource
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.processes import served

MIB = 1 << 20
MAX_BODY = 4 * MIB
MAX_CONNECTIONS = 1024
SLOTS = 4
TIMEOUT_S = 1.0
CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}


class Server:
    """The process, its log, and raw connections to it."""

    def __init__(self, process, log):
        self.url = process.url
        self.log = log
        self.process = psutil.Process(process.pid)
        parts = urlsplit(self.url)
        self.address = (parts.hostname, parts.port)

    def connect(self, receive_buffer=None):
        made = socket.socket()
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(60)
        made.connect(self.address)
        return made

    @contextmanager
    def connected(self, **options):
        with self.connect(**options) as made:
            yield made

    def client(self, key="a"):
        return httpx.Client(base_url=self.url, headers={"x-api-key": key}, timeout=60)

    def answers(self, key="b"):
        """Whether an ordinary client is served."""
        with self.client(key) as client:
            return client.post(CHAT, json=ASKED).status_code == 200

    def n_connections(self):
        return sum(c.status == "ESTABLISHED" for c in self.process.net_connections("tcp"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), n_context=16384)
    home = tmp_path_factory.mktemp("home")
    settings = {
        "KEEPWARM_API_KEYS": "a,b",
        "KEEPWARM_MAX_BODY_BYTES": str(MAX_BODY),
        "KEEPWARM_MAX_CONCURRENCY": str(SLOTS),
        "KEEPWARM_CLIENT_TIMEOUT_S": str(TIMEOUT_S),
    }
    with (
        (home / "log").open("w+") as log,
        served(checkpoint, home, log=log, **settings) as process,
    ):
        running = Server(process, home / "log")
        assert running.answers("a")
        assert running.answers("b")
        yield running


def header(path=CHAT, method="POST", **fields):
    """The header of a request, in bytes; `_` in a name is `-`."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def status_of(connection):
    """Status of the next answer; 0 if the connection ends without one."""
    line = b""
    with suppress(ConnectionError):
        while not line.endswith(b"\n") and (byte := connection.recv(1)):
            line += byte
    return int(line.split()[1]) if line else 0


def is_closed(connection):
    """Whether the server has closed it, once everything it sent is read."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


# Bodies


@pytest.mark.parametrize(
    ("path", "method", "fields", "expected"),
    [
        (CHAT, "POST", {}, 401),
        (CHAT, "POST", {"x_api_key": "wrong"}, 401),
        ("/v1/nothing", "POST", {"x_api_key": "a"}, 404),
        ("/v1/models", "POST", {"x_api_key": "a"}, 405),
        (CHAT, "POST", {"x_api_key": "a", "Content_Length": MAX_BODY + 1}, 413),
        ("/v1/admin/load", "POST", {"x_api_key": "a"}, 403),
        ("/health", "GET", {}, 413),
    ],
)
def test_a_request_is_refused_before_its_body_is_sent(server, path, method, fields, expected):
    fields = {"Content_Type": "application/json", "Content_Length": MAX_BODY, **fields}
    with server.connected() as connection:
        connection.sendall(header(path, method, **fields))
        assert status_of(connection) == expected


@pytest.mark.parametrize(("path", "size"), [("/health", "announced"), (CHAT, "chunked")])
def test_without_a_key_next_to_nothing_is_held(server, path, size):
    """Thirty connections send almost all of the largest body and stay: 120 MiB."""
    before = server.process.memory_info().rss
    length = {"Content_Length": MAX_BODY} if size == "announced" else {}
    length = length or {"Transfer_Encoding": "chunked"}
    body = b"x" * (MAX_BODY - 1)
    with ExitStack() as held:
        for _ in range(30):
            connection = held.enter_context(server.connected())
            connection.sendall(header(path, Content_Type="application/json", **length))
            with suppress(ConnectionError):  # refused, and closed meanwhile
                connection.sendall(body if size == "announced" else chunk(body))
        assert server.answers()
        assert server.process.memory_info().rss - before < 50 * MIB


def test_a_chunked_body_is_counted_as_it_comes(server):
    before = server.process.memory_info().rss
    with server.connected() as connection:
        fields = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}
        connection.sendall(header(x_api_key="a", **fields))
        with suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(chunk(b"x" * MIB))
        assert status_of(connection) in (413, 0)  # 0: it was closed while we still sent
    assert server.process.memory_info().rss - before < 50 * MIB


def test_a_body_over_the_limit_is_told_so_while_it_is_sent(server):
    with server.connected() as connection:
        fields = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}
        connection.sendall(header(x_api_key="a", **fields) + chunk(b"x" * (MAX_BODY + 1)))
        assert status_of(connection) == 413


@pytest.mark.parametrize("fields", [{}, {"Connection": "close"}])
def test_a_client_that_sends_before_it_reads_can_read_the_refusal(server, fields):
    client = http.client.HTTPConnection(*server.address, timeout=60)
    client.request("POST", CHAT, b"x" * MAX_BODY, {"Content-Type": "application/json", **fields})
    assert client.getresponse().status == 401
    client.close()


def test_one_keys_bodies_in_progress_are_bounded_and_others_have_room(server):
    fields = {"Content_Type": "application/json", "Content_Length": MAX_BODY}
    with ExitStack() as held:
        for _ in range(4):
            connection = held.enter_context(server.connected())
            connection.sendall(header(x_api_key="a", **fields))
        statuses = []

        def refused():
            with server.connected() as connection:
                connection.sendall(header(x_api_key="a", **fields))
                connection.settimeout(2.0)
                with suppress(TimeoutError):
                    statuses.append(status_of(connection))
            return 429 in statuses

        wait_until(refused)
        assert server.answers("b")
    wait_until(lambda: server.answers("a"))


def test_a_body_that_comes_slowly_is_given_up_and_leaves_its_slot(server):
    """As many as the key may have at once; then the key's own request is answered."""
    body = json.dumps(ASKED).encode()
    fields = {"Content_Type": "application/json", "Content_Length": len(body)}
    with ExitStack() as held:
        slow = [held.enter_context(server.connected()) for _ in range(SLOTS)]
        for connection in slow:
            connection.sendall(header(x_api_key="a", **fields) + body[:10])
        assert [status_of(connection) for connection in slow] == [408] * SLOTS
        assert server.answers("a")


# Connections


def drip(connection, data, until_s):
    """Send a byte now and then; whether the server closed the connection meanwhile."""
    end = time.monotonic() + until_s
    connection.settimeout(0.1)
    for byte in data:
        if time.monotonic() > end:
            return False
        try:
            connection.sendall(bytes([byte]))
            if not connection.recv(1):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize("sent", [b"", header()[:20], b"\r\n\r\n"])
def test_a_connection_without_a_request_is_closed(server, sent):
    with server.connected() as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_header_that_drips_is_closed(server):
    with server.connected() as connection:
        assert drip(connection, b"GET /" + b"x" * 600, until_s=60)
    with server.connected() as connection:  # the second header of a connection
        connection.sendall(header("/health/live", "GET"))
        assert status_of(connection) == 200
        assert drip(connection, b"GET /" + b"x" * 600, until_s=60)


def test_a_client_may_be_idle_between_requests(server):
    with server.client() as client:
        first = client.get("/health/live").extensions["network_stream"]
        time.sleep(1.5 * TIMEOUT_S)
        again = client.get("/health/live").extensions["network_stream"]
        assert again.get_extra_info("client_addr") == first.get_extra_info("client_addr")


def test_a_flood_of_connections_stops_nobody_and_fills_no_log(server):
    """More than it may have open files (mlx-lm sets 2,048); half have begun a header."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
    with server.client("a") as keeps, ExitStack() as held:
        assert keeps.get("/health/live").status_code == 200
        for number in range(2200):
            connection = held.enter_context(server.connected())
            if number % 2:
                with suppress(ConnectionError):
                    connection.sendall(header()[:20])
            if number % 500 == 0:
                assert server.answers("b")
                assert server.n_connections() <= MAX_CONNECTIONS
        assert server.answers("b")
        assert keeps.get("/health/live").status_code == 200  # on a new connection, if need be
        wait_until(lambda: server.n_connections() < 10)
    assert server.log.stat().st_size < 100_000


def test_what_is_no_http_is_not_logged_each_time(server):
    before = server.log.stat().st_size
    for _ in range(200):
        with server.connected() as connection:
            connection.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            assert status_of(connection) == 400
    assert server.log.stat().st_size - before < 4_000


# Clients that do not read


def test_a_client_that_does_not_read_is_cut_off(server):
    """Its answers are larger than all buffers on the way, and `close` would wait for ever."""
    before = server.n_connections()
    with server.connected(receive_buffer=4096) as connection:
        page = header("/openapi.json", "GET")
        connection.settimeout(1)
        with suppress(TimeoutError, ConnectionError):
            while True:
                connection.sendall(page * 100)
        wait_until(lambda: server.n_connections() <= before)


def test_a_stream_that_is_not_read_loses_its_slot(server):
    """Clients that read nothing have all slots of a key, until they are cut off."""
    long = {"max_tokens": 8000, "stream": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps({**ASKED, **long, "logit_bias": {"300": 100}}).encode()
    fields = {"Content_Type": "application/json", "Content_Length": len(body)}
    with ExitStack() as held:
        for _ in range(SLOTS):
            connection = held.enter_context(server.connected(receive_buffer=4096))
            connection.sendall(header(x_api_key="a", **fields) + body)
        wait_until(lambda: not server.answers("a"))
        assert server.answers("b")
        wait_until(lambda: server.answers("a"))


# Framing


SMUGGLED = header("/health/live", "GET")


@pytest.mark.parametrize(("path", "close"), [(CHAT, {}), ("/health", {"Connection": "keep-alive"})])
def test_two_lengths_are_refused_and_end_the_connection(server, path, close):
    fields = {"Content_Length": 5, "Transfer_Encoding": "chunked", "x_api_key": "a", **close}
    with server.connected() as connection:
        connection.sendall(header(path, **fields) + b"0\r\n\r\n" + SMUGGLED)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"send only one of them" in answer


def test_one_length_is_enough(server):
    body = json.dumps(ASKED).encode()
    for fields, sent in (
        ({"Content_Length": len(body)}, body),
        ({"Transfer_Encoding": "chunked"}, chunk(body) + b"0\r\n\r\n"),
    ):
        with server.connected() as connection:
            given = {"Content_Type": "application/json", "x_api_key": "a", **fields}
            connection.sendall(header(**given) + sent)
            assert status_of(connection) == 200

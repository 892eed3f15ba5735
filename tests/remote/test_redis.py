"""Redis as it is: orders, passwords, TLS; and servers that pause, restart, fill up, or lie."""

import datetime
import ipaddress
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keepwarm.concurrency import CallError
from keepwarm.errors import BadInput
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.redis import RedisBackend
from tests.kit.redis_server import redis_server
from tests.kit.waiting import wait_until

SOON = 30.0
SHORT = 0.05


def take(n_bytes):
    return memoryview(bytearray(n_bytes))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def blobs(server):
    with closing(open_backend(server.url)) as opened:
        yield opened


def test_a_connection_in_use_while_it_closes_is_closed_too(server):
    before = server.n_connections()
    blobs = open_backend(server.url)
    blobs.put("closing/x.d", [b"x"], SOON)
    server.pause()
    with ThreadPoolExecutor() as threads:
        call = threads.submit(blobs.sizes, ["closing/x.d"], SOON)
        wait_until(lambda: not blobs._idle)
        blobs.close()
        server.go_on()
        assert call.result() == [1]
    wait_until(lambda: server.n_connections() <= before)


def test_lists_are_used_with_what_they_name(blobs, monkeypatch):
    """So that they are evicted after it: without them a deletion misses what it cannot guess."""
    called = []
    monkeypatch.setattr(blobs, "_call", lambda commands, _: called.extend(commands))
    blobs.touch(["a/b/1.d", "a/b/2.d", "a/c/1.d"], SOON)
    names = [key.removeprefix(b"keepwarm:") for _, key in called]
    assert names == [b"a/b/1.d", b"a/b/2.d", b"a/c/1.d", b"a/b/", b"a/c/"]


def test_a_listing_leaves_nothing_out_while_others_delete(blobs, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.redis.PAGE", 2)
    names = [f"pages/{number}.d" for number in range(6)]
    for name in names:
        blobs.put(name, [b"x"], SOON)
    call = blobs._call

    def delete_the_first(commands, *args, **options):
        replies = call(commands, *args, **options)
        call([[b"ZREM", b"keepwarm:pages/", b"0.d", b"1.d"]], SOON)
        return replies

    monkeypatch.setattr(blobs, "_call", delete_the_first)
    assert [one.name for one in blobs.list_names("pages", SOON)] == names


def test_a_paused_server_takes_no_longer_than_the_deadline(server, blobs):
    blobs.put("paused/x.d", [b"x"], SOON)
    server.pause()
    try:
        began = time.monotonic()
        for call in (
            lambda: blobs.sizes(["paused/x.d"], SHORT),
            lambda: blobs.read("paused/x.d", take, SHORT),
            lambda: blobs.put("paused/y.d", [bytes(20 << 20)], SHORT),
        ):
            with pytest.raises(CallError, match="50 ms"):
                call()
        assert time.monotonic() - began < SOON
    finally:
        server.go_on()
    assert blobs.sizes(["paused/x.d"], SOON) == [1]


def test_a_server_that_restarted_is_called_on_new_connections(tmp_path):
    with redis_server(tmp_path) as server, closing(open_backend(server.url)) as blobs:
        assert blobs.put("a/x.d", [b"x"], SOON)
        server.kill()
        with pytest.raises(CallError):
            blobs.sizes(["a/x.d"], SOON)
        server.start()
        assert blobs.sizes(["a/x.d"], SOON) == [None]
        server.kill()
        server.start()
        assert blobs.sizes(["a/x.d"], SOON) == [None]  # on a connection that was open before


def test_a_host_that_is_no_name_is_a_failed_call():
    blobs = open_backend("redis://cache..internal")
    with closing(blobs), pytest.raises(CallError, match=r"cache\.\.internal"):
        blobs.sizes(["a/x.d"], SOON)


def test_a_full_server_refuses_and_is_no_error(tmp_path):
    limits = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    with redis_server(tmp_path, *limits) as server, closing(open_backend(server.url)) as blobs:
        stored = [blobs.put(f"a/{n}.d", [bytes(1 << 20)], SOON) for n in range(8)]
        assert stored[0]
        assert not stored[-1]
        assert blobs.sizes(["a/0.d"], SOON) == [1 << 20]


def test_the_password_is_asked_for(tmp_path):
    with redis_server(tmp_path, "--requirepass", "right") as server:
        with closing(open_backend(server.url, "right")) as blobs:
            assert blobs.put("a/x.d", [b"x"], SOON)
        for password, said in (("", "NOAUTH"), ("wrong", "WRONGPASS")):
            with (
                closing(open_backend(server.url, password)) as blobs,
                pytest.raises(CallError, match=said),
            ):
                blobs.sizes(["a/x.d"], SOON)


def self_signed(directory):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    (directory / "cert.pem").write_bytes(made.public_bytes(pem))
    (directory / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password)
    )


def test_tls_needs_a_certificate_that_is_trusted(tmp_path, monkeypatch):
    self_signed(tmp_path)
    files = ("--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-auth-clients", "no")
    with redis_server(tmp_path, *files, tls=True) as server:
        with (
            closing(open_backend(server.url)) as blobs,
            pytest.raises(CallError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            blobs.sizes(["a/x.d"], SOON)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        with closing(open_backend(server.url)) as blobs:
            data = bytes(range(256)) * 20_000
            assert blobs.put("a/x.d", [data[:10], data[10:]], SOON)
            assert bytes(blobs.read("a/x.d", take, SOON)) == data


def test_new_tls_connections_are_made_with_one_context_beside_the_question(tmp_path, monkeypatch):
    """To make a context takes longer than a question may."""
    self_signed(tmp_path)
    files = ("--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-auth-clients", "no")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    made, make = [], ssl.create_default_context

    def counted():
        made.append(make())
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    with (
        redis_server(tmp_path, *files, tls=True) as server,
        closing(open_backend(server.url)) as blobs,
    ):
        for _ in range(12):
            blobs._drop_idle()
            assert blobs.sizes(["a/x.d"], SOON) == [None]
        blobs._drop_idle()
        monkeypatch.setattr(blobs, "_connecting_since", time.monotonic())

        def connected():
            if not blobs._idle:  # else the question would take the new one, and close it
                with suppress(CallError):  # it goes on to connect, and that is no failure
                    blobs.sizes(["a/x.d"], 0.0001)
            return blobs._idle

        wait_until(connected)
    assert len(made) == 1


@contextmanager
def lying(reply):
    """A server that answers the first command with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with listening.accept()[0] as one:
                one.recv(1 << 16)
                reply(one)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"redis://127.0.0.1:{listening.getsockname()[1]}"
        with closing(open_backend(url)) as blobs:
            yield blobs
        thread.join(SOON)


def test_a_server_that_closes_every_connection_is_not_asked_without_end(monkeypatch):
    keep = RedisBackend._keep

    def keep_later(self, connection):
        time.sleep(0.02)  # the server's end is known by then
        keep(self, connection)

    monkeypatch.setattr(RedisBackend, "_keep", keep_later)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        n_accepted = 0

        def serve():
            nonlocal n_accepted
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()
                    n_accepted += 1

        threading.Thread(target=serve, daemon=True).start()
        url = f"redis://127.0.0.1:{listening.getsockname()[1]}"
        with (
            closing(open_backend(url)) as blobs,
            pytest.raises(CallError, match="closes new connections"),
        ):
            blobs.sizes(["a/x.d"], SOON)
        assert n_accepted <= 9


def trickle(one):
    one.sendall(b"$1000000\r\n")
    for _ in range(100):
        try:
            one.sendall(b"x")
        except OSError:
            return
        time.sleep(0.02)


@pytest.mark.parametrize(
    "reply",
    [
        lambda one: one.sendall(b"$100\r\nhalf"),  # cut in the middle of a value
        lambda one: one.sendall(b"$5\r\nwrong ends"),
        lambda one: one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda one: one.sendall(b"*1\r\n" * 50),
        lambda one: one.sendall(b":seven\r\n"),
        lambda one: one.sendall(b"x" * 200_000),
        lambda one: one.close(),
        trickle,
    ],
    ids=["cut", "end", "http", "nested", "number", "endless", "closed", "trickle"],
)
def test_bytes_that_are_no_answer_are_an_error(reply):
    with lying(reply) as blobs, pytest.raises(CallError):
        blobs.read("a/x.d", take, 0.5)


@pytest.mark.parametrize("reply", [b"-MOVED 3999 127.0.0.1:6381\r\n", b"-ASK 7 10.0.0.1:1\r\n"])
def test_a_cluster_of_several_shards_is_refused_by_name(reply):
    with lying(lambda one: one.sendall(reply)) as blobs, pytest.raises(BadInput, match="one shard"):
        blobs.sizes(["a/x.d"], SOON)


def test_a_server_that_sends_more_than_it_was_asked_for_gets_no_memory():
    asked = []

    def note(n_bytes):
        asked.append(n_bytes)
        return take(min(n_bytes, 100))

    def send_much(one):
        one.sendall(b"$%d\r\n" % 10**14)

    with lying(send_much) as blobs, pytest.raises(CallError, match="too large"):
        blobs.read("a/x.d", note, SOON, n_bytes=100)
    assert asked == []


def test_a_refused_connection_is_an_error():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{one.getsockname()[1]}"
        with closing(open_backend(url)) as blobs, pytest.raises(CallError):
            blobs.sizes(["a/x.d"], SOON)

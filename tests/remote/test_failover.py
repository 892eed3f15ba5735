"""A Redis that is replaced behind its name, evicts whatever it likes or takes no writes: the tier
is used again soon, and nothing that all machines need is lost.
"""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from keepwarm.concurrency import BusyError, CallDeadline, CallError
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.deleter import erase_from_tier
from keepwarm.remote.handshake import STORE_META
from keepwarm.remote.records import CLASSES, list_classes
from keepwarm.remote.redis import MAX_IDLE, MOVED, NOT_WRITABLE
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.marker import make_mark
from keepwarm.store.tier import NamedBlock, RemoteLookup
from tests.kit.faulty_proxy import FaultyProxy
from tests.kit.redis_server import free_port, redis_server
from tests.kit.waiting import wait_until
from tests.store.kit import NAMESPACE, content, record, refs_of

SOON, RECOVERY_S = 60.0, 20.0  # on a busy machine too
CLASS = "cpu-mlx-0.1"
(ONE,), (TWO,) = refs_of(1), refs_of(1, seed=2)
RECORD = record(ONE)
QUESTION = RemoteLookup(NAMESPACE, [ONE], 1, 0, True, 0, False)


def tell(server, *commands):
    with socket.create_connection(("127.0.0.1", server.port), SOON) as one:
        for command in commands:
            one.sendall(f"{command}\r\n".encode())
            assert one.recv(1000).startswith((b"+", b":")), command


class Fleet:
    """Two servers of which the second has what the first has, a proxy, and a machine behind it."""

    def __init__(self, stack, directory):
        self.first = stack.enter_context(redis_server(directory))
        self.second = stack.enter_context(redis_server(directory))
        self.proxy = stack.enter_context(closing(FaultyProxy(self.first.port)))
        backend = open_backend(f"redis://127.0.0.1:{self.proxy.port}")
        self.tier = stack.enter_context(closing(RemoteTier(backend, CLASS)))
        assert self.tier.health.wait_until_tried(SOON)
        with closing(RemoteTier(open_backend(self.second.url), CLASS)) as other:
            assert other.health.wait_until_tried(SOON)
            assert other.put(RECORD).stored

    def fill_pool(self):
        """As many connections as are kept."""
        self.proxy.pause()
        with ThreadPoolExecutor(MAX_IDLE) as threads:
            calls = [threads.submit(self.tier.backend.sizes, ["x"], SOON) for _ in range(MAX_IDLE)]
            wait_until(lambda: len(self.proxy._open) == 2 * MAX_IDLE)
            wait_until(lambda: not self.tier.backend._idle)
            self.proxy.go_on()
            assert all(call.result() == [None] for call in calls)
        assert len(self.tier.backend._idle) == MAX_IDLE

    def recovers_in_s(self):
        """Seconds until a question finds what the second server has, and a record is put."""
        began, known, is_put = time.monotonic(), self.tier._known, False
        while time.monotonic() < began + SOON:
            self.tier.look_up(QUESTION, CallDeadline(0.05))
            # Also one that is there already, because the answer to putting it was lost.
            is_put = self.tier.put(record(TWO)).durable.exception() is None or is_put
            if is_put and self.tier.read(ONE.key, Part.DELTA) is not None:
                return time.monotonic() - began
            known._blocks.clear()
            known._children.clear()
            time.sleep(0.05)
        return SOON


@pytest.fixture
def fleet(tmp_path):
    with ExitStack() as stack:
        yield Fleet(stack, tmp_path)


def demoted(fleet):
    """Its connections go on leading to it, and it takes no writes."""
    tell(fleet.first, f"REPLICAOF 127.0.0.1 {fleet.second.port}")
    fleet.proxy.move_to(fleet.second.port)


def cut_off(fleet):
    """A replica that has lost its primary answers nothing."""
    tell(fleet.first, "CONFIG SET replica-serve-stale-data no")
    tell(fleet.first, f"REPLICAOF 127.0.0.1 {free_port()}")
    fleet.proxy.move_to(fleet.second.port)


def stranded(fleet):
    """Half-open: nobody answers on the connections, and nobody has closed them."""
    fleet.proxy.strand()
    fleet.proxy.move_to(fleet.second.port)


@pytest.mark.parametrize("replace", [demoted, cut_off, stranded])
def test_a_server_that_was_replaced_is_used_within_seconds(fleet, replace):
    fleet.fill_pool()
    replace(fleet)
    assert fleet.recovers_in_s() < RECOVERY_S


def test_it_recovers_after_an_outage_in_which_trials_hung(fleet, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.health.TRIAL_S", 0.5)
    monkeypatch.setattr("keepwarm.remote.health.TIDY_S", 0.2)
    fleet.fill_pool()
    fleet.proxy.pause()
    for _ in range(3):
        fleet.tier.look_up(QUESTION, CallDeadline(0.05))
    assert fleet.tier.is_open
    wait_until(lambda: fleet.tier.health.retry_in_s == 0)
    monkeypatch.undo()
    fleet.proxy.strand()
    fleet.proxy.move_to(fleet.second.port)
    assert fleet.recovers_in_s() < RECOVERY_S


@contextmanager
def replying(*replies):
    """A server that answers each command on a connection with the next of these."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    one = listening.accept()[0]
                except OSError:
                    return
                threading.Thread(target=answer, args=(one,), daemon=True).start()

        def answer(one):
            with one:
                for reply in replies:
                    if not one.recv(1 << 16):
                        return
                    one.sendall(reply)
                one.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with closing(open_backend(f"redis://127.0.0.1:{listening.getsockname()[1]}")) as blobs:
            yield blobs
        listening.shutdown(socket.SHUT_RDWR)


def test_a_reply_too_many_is_not_taken_for_the_next():
    with replying(b":1\r\n:1\r\n", b":2\r\n") as blobs:
        assert blobs.sizes(["a/x"], SOON) == [1]
        assert blobs.sizes(["a/y"], SOON) == [1], "the first reply of a new connection"
    with replying(b":1\r\n", b":2\r\n") as blobs:
        assert [blobs.sizes(["a/x"], SOON) for _ in range(2)] == [[1], [2]], "the same connection"


@pytest.mark.parametrize("word", MOVED)
def test_a_connection_to_a_server_that_was_replaced_is_dropped(word):
    with replying(b":1\r\n", f"-{word} it is\r\n".encode(), b":3\r\n") as blobs:
        assert [blobs.sizes(["a/x"], SOON) for _ in range(2)] == [[1], [1]]


@pytest.mark.parametrize("word", NOT_WRITABLE)
def test_a_server_that_takes_no_writes_has_no_room(word):
    said = f"-{word} not now\r\n".encode()
    with replying(2 * said) as blobs:
        assert blobs.put("a/x", [b"x"], SOON) is False


def test_connections_are_kept_alive(fleet):
    fleet.tier.backend.sizes(["x"], SOON)
    sock = fleet.tier.backend._idle[-1]._socket
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) <= 5


def test_every_address_of_a_name_is_tried(tmp_path, monkeypatch):
    """As of `localhost`, where the server listens to one of two."""
    known = socket.getaddrinfo

    def both(host, port, *args, **options):
        hosts = ("::1", "127.0.0.1") if host == "two.test" else (host,)
        return [one for each in hosts for one in known(each, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with (
        redis_server(tmp_path, "--bind", "127.0.0.1") as server,
        closing(open_backend(f"redis://two.test:{server.port}")) as blobs,
    ):
        assert blobs.sizes(["a/x"], SOON) == [None]


def test_connecting_that_takes_longer_than_a_question_is_no_failure(monkeypatch, tmp_path):
    """The connection is there for the next one; only a server that accepts none has failed."""
    gate, connect = threading.Event(), socket.create_connection

    def slow(*args):
        gate.wait(SOON)
        return connect(*args)

    with redis_server(tmp_path) as server, closing(open_backend(server.url)) as blobs:
        monkeypatch.setattr(socket, "create_connection", slow)
        with pytest.raises(BusyError):
            blobs.sizes(["a/x"], 0.01)
        monkeypatch.setattr("keepwarm.remote.redis.CONNECT_S", 0.0)
        with pytest.raises(CallError) as late:
            blobs.sizes(["a/x"], 0.01)
        assert not isinstance(late.value, BusyError)
        gate.set()
        wait_until(lambda: len(blobs._idle) == 2)
        monkeypatch.setattr(socket, "create_connection", None)
        assert blobs.sizes(["a/x"], SOON) == [None]


# Eviction


def evict(server, *names):
    with closing(open_backend(server.url)) as place:
        keys = [f"keepwarm:{name}".encode() for name in names]
        place._call([[b"UNLINK", key] for key in keys], SOON)


@contextmanager
def machine(url, compute_class=CLASS, **options):
    with closing(RemoteTier(open_backend(url), compute_class, **options)) as tier:
        assert tier.health.wait_until_tried(SOON) or tier.health.refused
        yield tier


@pytest.mark.parametrize("cipher", [None, Cipher(b"s" * 32)], ids=["plain", "sealed"])
def test_a_use_puts_back_what_all_machines_need(tmp_path, cipher):
    own = make_mark(cipher, {}) if cipher else b""
    with (
        redis_server(tmp_path) as server,
        machine(server.url, cipher=cipher, mark=own) as tier,
        closing(open_backend(server.url)) as place,
    ):
        mark = bytes(place.read(STORE_META, lambda n: memoryview(bytearray(n)), SOON))
        with machine(server.url, "cpu-mlx-0.2", cipher=cipher):
            pass
        tier.put(RECORD)
        tier.note_use([ONE.key])
        evict(server, STORE_META, f"{CLASSES}/")
        tier.note_use([ONE.key])
        assert list_classes(place, SOON) == [CLASS, "cpu-mlx-0.2"]
        assert bytes(place.read(STORE_META, lambda n: memoryview(bytearray(n)), SOON)) == mark


def test_allkeys_lru_evicts_records_before_what_all_machines_need(tmp_path):
    limits = (
        "--maxmemory",
        "8mb",
        "--maxmemory-policy",
        "allkeys-lru",
        "--maxmemory-samples",
        "10",
    )
    with (
        redis_server(tmp_path, *limits) as server,
        machine(server.url) as tier,
        closing(open_backend(server.url)) as place,
    ):
        for number in range(60):
            assert place.put(f"old/{number}", [bytes(1 << 18)], SOON)
            time.sleep(0.05)
            (ref,) = refs_of(1, seed=number)
            tier.put(record(ref))
            tier.note_use([ref.key])
        assert place.sizes(["old/0"], SOON) == [None]
        assert place.sizes([STORE_META], SOON) != [None]
        assert list_classes(place, SOON) == [CLASS]


@pytest.mark.parametrize("gone", [STORE_META, f"{CLASSES}/"])
def test_a_deletion_that_cannot_tell_the_classes_is_tried_again(fleet, gone):
    named = NamedBlock(ONE.key, ONE.parent, ONE.n_tokens)
    with machine(fleet.second.url, "cpu-mlx-0.2") as other, machine(fleet.second.url) as tier:
        other.put(RECORD)
        evict(fleet.second, gone)
        assert not erase_from_tier(tier, [NAMESPACE], [named], ())
        tier._keep_books(CallDeadline(SOON))
        assert erase_from_tier(tier, [NAMESPACE], [named], ())
        for each in (tier, other):
            each.look_up(QUESTION, CallDeadline(SOON))
            assert not each.have([ONE.key])


def test_a_deletion_includes_the_own_class_if_only_others_are_listed(fleet):
    named = NamedBlock(ONE.key, ONE.parent, ONE.n_tokens)
    with machine(fleet.second.url) as tier, closing(open_backend(fleet.second.url)) as place:
        evict(fleet.second, f"{CLASSES}/")
        assert place.put(f"{CLASSES}/another", [b"1"], SOON)
        assert erase_from_tier(tier, [NAMESPACE], [named], ())
        tier.look_up(QUESTION, CallDeadline(SOON))
        assert not tier.have([ONE.key])


def test_what_was_refused_is_tried_again(monkeypatch, fleet):
    monkeypatch.setattr("keepwarm.remote.health.REFUSED_RETRY_S", 0.05)
    with closing(open_backend(fleet.second.url)) as place:
        place.put(STORE_META, [b"plain"], SOON, replace=True)
        with machine(fleet.second.url) as tier:
            assert "Another version" in tier.health.refused
            place.delete([STORE_META], SOON)
            wait_until(lambda: not tier.is_open)
            assert tier.health.refused == ""


# Readable, not writable


def replica(server):
    tell(server, "CONFIG SET replica-serve-stale-data yes", f"REPLICAOF 127.0.0.1 {free_port()}")
    return "REPLICAOF NO ONE"


def reader(server):
    tell(server, "ACL SETUSER default resetkeys ~keepwarm:* -@all +@read +acl")
    return "ACL SETUSER default +@all"


@pytest.mark.parametrize("limit", [replica, reader])
def test_what_may_be_read_but_not_written_is_read(fleet, limit, caplog, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.tier.MAX_RETRY_S", 0.05)
    undo = limit(fleet.second)
    with machine(fleet.second.url) as tier:
        assert not tier.is_open
        assert not tier.is_writable
        assert "read-only" in caplog.text
        tier.look_up(
            QUESTION,
            CallDeadline(SOON),
        )
        assert content(tier.read(ONE.key, Part.DELTA)) == content(RECORD)
        tier.note_use([ONE.key])
        named = NamedBlock(ONE.key, ONE.parent, ONE.n_tokens)
        for _ in range(4):
            assert not erase_from_tier(tier, [NAMESPACE], [named], ())
        assert tier.is_trusted, "to refuse a write is no failure"
        tell(fleet.second, undo)
        wait_until(lambda: tier.is_writable)


# Distance


@pytest.mark.parametrize(("round_trip_s", "computing_s"), [(0.03, 10.0), (0.06, 10.0)])
def test_a_distant_server_is_used_for_what_takes_long_to_compute(fleet, round_trip_s, computing_s):
    fleet.proxy.move_to(fleet.second.port)
    fleet.proxy.disconnect()
    fleet.proxy.delay_s = round_trip_s
    fleet.tier._measure(CallDeadline(SOON))
    assert fleet.tier.speed.call_s >= round_trip_s
    fleet.tier.speed._calls.extend([0.4] * 100)  # as on a busy machine
    before = fleet.tier.stats().errors
    for _ in range(5):
        fleet.tier._known._blocks.clear()
        fleet.tier._known._children.clear()
        assert fleet.tier.ask(QUESTION, computing_s)
        assert fleet.tier.have([ONE.key])
    assert fleet.tier.stats().errors == before
    n_calls = len(fleet.tier.speed._calls)
    assert fleet.tier.ask(QUESTION._replace(n_here=1), 0.1), "too far for so little"
    assert len(fleet.tier.speed._calls) == n_calls

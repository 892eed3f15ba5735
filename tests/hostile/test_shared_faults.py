"""Every place that machines share and every fault: no wrong tensor, and answers go on.

The table of expectations below is tested, and written to `docs/results/remote.md`:

    python -m tests.hostile.test_shared_faults
"""

import os
import re
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.restorer import Restorer
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.kv.layout import probe
from keepwarm.prefix.blocks import Namespace, chain
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.remote import directory
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import FolderRange, Listed
from keepwarm.remote.lookup import PRESENT_S
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.kit.compare import assert_same
from tests.kit.faulty_proxy import FaultyProxy
from tests.kit.places import FUSE, KINDS, WEED
from tests.kit.redis_server import free_port, redis_server
from tests.kit.runs import cold, continue_from, prefill, prompt_of
from tests.store.kit import first_block, record

PAGE = Path(__file__).parents[2] / "docs" / "results" / "remote.md"
COLUMNS = KINDS
MORE = {WEED: "s3", FUSE: "directory"}  # other places, and the column that holds for them
NAME = Namespace(bytes(range(32)))
NUMBERS = count()
N = 3  # tokens generated to compare
SOON, SHORT = 60.0, 0.03
PROMPT = prompt_of(600, seed=1)  # blocks 0 and 1, and a tail
OTHER = prompt_of(300, seed=3)
ALL, BEFORE_IT = len(PROMPT) - 1, 256


class Clock:
    """Of what is remembered and of the breaker; it stands still unless it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Haunted:
    """A place whose listings go on naming what is gone."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.ghosts: list[Listed] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def look(self, ranges: list[FolderRange], timeout_s: float) -> list[list[Listed]]:
        lists = self._backend.look(ranges, timeout_s)
        return [[*listed, *self._of(one)] for one, listed in zip(ranges, lists, strict=True)]

    def _of(self, one: FolderRange) -> list[Listed]:
        return [ghost for ghost in self.ghosts if ghost.name.startswith(one.folder + "/")]


class Computed:
    """Two prompts as one machine has computed them, and what they are answered with."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layout = probe(model, make_prompt_cache(model))
        self._memory = MemoryTier(1 << 30)
        self._cold = cache(lambda prompt: cold(model, list(prompt), N))
        tiers = Tiers([("memory", self._memory)])
        for prompt in (PROMPT, OTHER):
            capture = self.restorer(tiers, Reader(tiers)).open(prompt)
            capture.start_at(0)
            capture.finish(prompt, prefill(model, make_prompt_cache(model), prompt))
        blocks = sorted(self._memory.walk(), key=lambda block: block.number)
        self.records = [self._memory.read(one.key, part) for one in blocks for part in one.n_bytes]

    def restorer(self, tiers: Tiers, reader: Reader) -> Restorer:
        rates = Rates(load_bytes_per_s=1e12, prefill_tokens_per_s=1e-3)
        return Restorer(NAME, self._layout, tiers, reader, MemorySaver(self._memory), rates)

    def compare(self, prompt: list[int], restored: Any) -> None:
        """The answer from here on must equal that of a cold run."""
        caches = restored.caches or make_prompt_cache(self._model)
        run = continue_from(self._model, caches, prompt[restored.n_tokens :], N)
        assert_same(self._cold(tuple(prompt)), run)


class Scene:
    """A place with two prompts in it, the machine that put them, and another that looks there."""

    def __init__(self, kind: str, url: str, server: Any, computed: "Computed") -> None:
        self.kind, self.server, self._computed = kind, server, computed
        self._class = f"class-{next(NUMBERS)}"  # servers are shared
        self.clock = Clock()
        self.root = Path(urlsplit(url).path) if kind == "directory" else None
        self.proxy = None if self.root else FaultyProxy(int(re.findall(r":(\d+)", url)[-1]))
        near = url if self.proxy is None else re.sub(r":\d+(?!.*:\d)", f":{self.proxy.port}", url)
        self.place = open_backend(url)
        self.there = Haunted(open_backend(near))
        self.first = self._tier(self.place)
        self.second = self._tier(self.there)
        self._reader = Reader(Tiers([], [self.second]), n_threads=2)
        self.share()

    def _tier(self, backend: Any) -> RemoteTier:
        tier = RemoteTier(backend, self._class, clock=self.clock)
        assert tier.health.wait_until_tried(SOON)
        return tier

    def share(self) -> list[bool]:
        """The first machine puts all that is not there."""
        return [self.first.put(record).stored for record in self._computed.records]

    def ask(self, prompt: list[int]) -> Restorer:
        restorer = self._computed.restorer(Tiers([], [self.second]), self._reader)
        restorer.ask(prompt, Policy.READ_WRITE)
        return restorer

    def reuse(self, prompt: list[int], between: Callable[[], None] | None = None) -> int:
        """Tokens that the second machine restores; its answer must equal that of a cold run."""
        restorer = self.ask(prompt)
        if between is not None:
            between()
        restored = restorer.restore(prompt)
        self._computed.compare(prompt, restored)
        return restored.n_tokens

    def name(self, number: int) -> str:
        ref = list(chain(NAME, PROMPT))[number]
        record = RemoteRecord(NAME, ref.parent, ref.key, Part.DELTA, ref.n_tokens)
        return RemoteNames(self._class).of(record)

    def value(self, number: int) -> bytes:
        return bytes(self.place.read(self.name(number), take, SOON))

    def write(self, number: int, data: bytes) -> None:
        assert self.place.put(self.name(number), [data], SOON, replace=True)

    def delete(self, number: int) -> None:
        self.place.delete([self.name(number)], SOON)

    def forget(self) -> None:
        """All that is known of the place."""
        self.clock.now += 2 * PRESENT_S

    def close(self) -> None:
        for tier in (self.first, self.second):
            tier.close()
        self._reader.close()
        if self.proxy:
            self.proxy.close()


def take(n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))


class Cell(NamedTuple):
    """What is restored of the prompt while a fault lasts, and what the page says about it."""

    outcome: str
    prompt: int
    is_stored: bool = True  # whether the other prompt is restored too


HIT = Cell("hit", ALL)
NOT_KEPT = Cell("hit; new blocks are not shared", ALL)
FROM_BLOCK = Cell("miss from token 256", BEFORE_IT)
FROM_TAIL = Cell("miss from token 512", 512)
MISS = Cell("miss", 0)
GONE = Cell("miss", 0, is_stored=False)
LATE = Cell("miss at the deadline", 0, is_stored=False)
NONE: None = None

Undo = Callable[[], None] | None


class Fault(NamedTuple):
    name: str
    damage: Callable[[Scene], Undo]
    redis: Cell | None
    directory: Cell | None
    s3: Cell | None
    always: str = ""  # the kind that it is tested with on every run; the others need --soak
    hangs: bool = False

    def cell(self, kind: str) -> Cell | None:
        found: Cell | None = getattr(self, kind)
        return found


# Of the way there


def refused(scene: Scene) -> Undo:
    if scene.proxy is None:
        away = scene.root.with_name("away")
        scene.root.rename(away)
        return lambda: away.rename(scene.root)
    scene.proxy.refuse()
    return scene.proxy.listen


def not_mounted(scene: Scene) -> Undo:
    """What is below the share can be written to."""
    share = scene.root.rename(scene.root.with_name("share"))
    scene.root.mkdir()

    def mount() -> None:
        shutil.rmtree(scene.root)
        share.rename(scene.root)

    return mount


def paused(scene: Scene) -> Undo:
    if scene.proxy is not None:
        scene.proxy.pause()
        return scene.proxy.go_on
    scene.ask(PROMPT)  # it is known to be there
    is_back, fill = threading.Event(), directory._fill

    def hang(*what: Any) -> None:
        """As when the server of a share is gone."""
        is_back.wait()
        fill(*what)

    hanging = patch.object(directory, "_fill", hang)
    hanging.start()

    def go_on() -> None:
        hanging.stop()
        is_back.set()

    return go_on


def on_values(change: Callable[[bytes, Callable[[bytes], None], threading.Event], None]) -> Any:
    """What happens to large parts of replies."""

    def damage(scene: Scene) -> Undo:
        ended = threading.Event()
        scene.proxy.on_value = lambda data, send: change(data, send, ended)

        def undo() -> None:
            ended.set()
            scene.proxy.mend()
            scene.proxy.disconnect()

        return undo

    return damage


def hang(data: bytes, send: Any, ended: threading.Event) -> None:
    send(data[:1000])
    ended.wait(SOON)


def cut(data: bytes, send: Any, ended: threading.Event) -> None:
    send(data[:1000])
    raise ConnectionError("cut")


def trickle(data: bytes, send: Any, ended: threading.Event) -> None:
    for byte in data:
        send(bytes([byte]))
        if ended.wait(1.0):
            return


def flip(data: bytes, send: Any, ended: threading.Event) -> None:
    at = len(data) // 2
    send(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def answered(redis: bytes, status: str, only: bytes = b"") -> Any:
    """Every request gets this answer, or only those that begin so."""
    http = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()

    def damage(scene: Scene) -> Undo:
        said = redis if scene.kind == "redis" else http
        scene.proxy.answer = lambda data: said if data.startswith(only) else None
        scene.proxy.disconnect()
        return scene.proxy.mend

    return damage


# Of what is there


def rewritten(change: Callable[[bytearray], bytes]) -> Any:
    def damage(scene: Scene) -> Undo:
        scene.write(1, bytes(change(bytearray(scene.value(1)))))
        return None

    return damage


def flipped(data: bytearray) -> bytes:
    data[-5] ^= 1
    return bytes(data)


def swapped(scene: Scene) -> Undo:
    one, two = scene.value(0), scene.value(1)
    scene.write(0, two)
    scene.write(1, one)
    return None


def stale(scene: Scene) -> Undo:
    scene.there.ghosts = [Listed(scene.name(2), 1 << 20)]
    scene.delete(2)
    return scene.there.ghosts.clear


def evicted(scene: Scene) -> Undo:
    """After the question, before the read."""
    assert scene.reuse(PROMPT, lambda: scene.delete(1)) == BEFORE_IT
    return None


def configure(scene: Scene, *words: str) -> None:
    with socket.create_connection(("127.0.0.1", scene.server.port), SOON) as one:
        for line in words:
            one.sendall(f"{line}\r\n".encode())
            assert one.recv(100) == b"+OK\r\n"


def full(scene: Scene) -> Undo:
    undo: Undo
    if scene.kind == "redis":
        configure(scene, "CONFIG SET maxmemory 1")
        undo = lambda: configure(scene, "CONFIG SET maxmemory 0")  # noqa: E731
    elif scene.kind == "s3":
        undo = answered(b"", "507 Insufficient Storage", b"PUT")(scene)
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        undo = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)  # noqa: E731
    before_it = scene.second.stats()
    new = record(first_block([5], NAME), namespace=NAME)
    assert not scene.second.put(new).stored
    after = scene.second.stats()
    assert (after.refused - before_it.refused, after.errors - before_it.errors) == (1, 0)
    return undo


def read_only(scene: Scene) -> Undo:
    """A replica; a bucket without the right to put."""
    if scene.kind == "s3":
        body = b"<Error><Code>AccessDenied</Code></Error>"
        head = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        said = head % len(body) + body
        scene.proxy.answer = lambda data: said if data.startswith(b"PUT") else None
        scene.proxy.disconnect()
        return scene.proxy.mend
    configure(scene, f"REPLICAOF 127.0.0.1 {free_port()}")
    return lambda: configure(scene, "REPLICAOF NO ONE")


def wrong_password(scene: Scene) -> Undo:
    if scene.kind == "s3":
        return answered(b"", "403 Forbidden")(scene)
    configure(scene, "CONFIG SET requirepass right")
    scene.proxy.disconnect()
    return lambda: configure(scene, "AUTH right", 'CONFIG SET requirepass ""')


def clock_off(scene: Scene) -> Undo:
    """S3 refuses a signature of another day; others look at no clock, or at their own."""
    if scene.kind == "s3":
        return answered(b"", "403 RequestTimeTooSkewed")(scene)
    for path in scene.root.rglob("*.d") if scene.root else ():
        os.utime(path, (time.time() + 86400, time.time() + 86400))
    return None


def emptied(scene: Scene) -> Undo:
    """Killed, and restarted without what it had."""
    scene.ask(PROMPT)  # it is known to be there
    if scene.kind == "redis":
        scene.server.kill()
        scene.server.start()
    elif scene.root:
        for path in scene.root.iterdir():
            if path.name != "meta":  # the mark: without it nothing is mounted
                shutil.rmtree(path)
    else:
        for number in range(3):
            listed = scene.place.list_names(scene.name(number).rpartition("/")[0], SOON)
            scene.place.delete([one.name for one in listed], SOON)
    return None


FAULTS = (
    Fault("refused, not mounted", refused, GONE, GONE, GONE, "redis"),
    Fault("not mounted, the mount point is writable", not_mounted, NONE, GONE, NONE, "directory"),
    Fault("paused", paused, LATE, LATE, LATE, "s3", hangs=True),
    Fault("hangs in the middle of a value", on_values(hang), LATE, NONE, LATE, "redis", hangs=True),
    Fault("closes in the middle of a value", on_values(cut), GONE, NONE, GONE, "s3"),
    Fault("1 byte a second", on_values(trickle), LATE, NONE, LATE, hangs=True),
    Fault("answers with an error (`-LOADING`, 500)",
          answered(b"-LOADING it is loading\r\n", "500 Internal Server Error"), GONE, NONE, GONE),
    Fault("a byte flipped on the way", on_values(flip), GONE, NONE, GONE, "redis"),
    Fault("a byte flipped there", rewritten(flipped), FROM_BLOCK, FROM_BLOCK, FROM_BLOCK),
    Fault("two values swapped", swapped, MISS, MISS, MISS, "directory"),
    Fault("truncated", rewritten(lambda data: bytes(data[:-100])), FROM_BLOCK, FROM_BLOCK,
          FROM_BLOCK),
    Fault("a listing that names what is gone", stale, FROM_TAIL, FROM_TAIL, FROM_TAIL, "redis"),
    Fault("evicted between question and read", evicted, FROM_BLOCK, FROM_BLOCK, FROM_BLOCK,
          "directory"),
    Fault("full", full, NOT_KEPT, NOT_KEPT, NOT_KEPT),
    Fault("may be read, not written", read_only, NOT_KEPT, NONE, NOT_KEPT, "redis"),
    Fault("wrong password", wrong_password, GONE, NONE, GONE, "redis"),
    Fault("a clock that is off by a day", clock_off, HIT, HIT, GONE),
    Fault("killed and restarted empty", emptied, GONE, GONE, GONE, "redis"),
)  # fmt: skip


class Trouble(NamedTuple):
    """What operators meet, what comes of it, and the tests that show it."""

    name: str
    outcome: str
    file: str
    tests: tuple[str, ...]


TROUBLES = (
    Trouble("`allkeys-lru` and rules by age evict the mark or the list of classes",
            "the next use puts them back; a deletion that cannot tell the classes is tried again",
            "remote/test_failover.py",
            ("test_allkeys_lru_evicts_records_before_what_all_machines_need",
             "test_a_use_puts_back_what_all_machines_need",
             "test_a_deletion_that_cannot_tell_the_classes_is_tried_again")),
    Trouble("failover: a demoted server, connections that lead to it or nowhere, trials that hang",
            "used again within 10 s", "remote/test_failover.py",
            ("test_a_server_that_was_replaced_is_used_within_seconds",
             "test_it_recovers_after_an_outage_in_which_trials_hung")),
    Trouble("a reply too many", "that connection is not used again", "remote/test_failover.py",
            ("test_a_reply_too_many_is_not_taken_for_the_next",)),
    Trouble("TLS, or connecting that takes longer than a question",
            "one context for all; the next question finds the connection; no failure",
            "remote/test_redis.py",
            ("test_new_tls_connections_are_made_with_one_context_beside_the_question",)),
    Trouble("30 and 60 ms away", "asked where that is a tenth of computing, else `too far`",
            "remote/test_failover.py",
            ("test_a_distant_server_is_used_for_what_takes_long_to_compute",)),
    Trouble("a replica, a user with `@read`", "read, not written; deletions wait",
            "remote/test_failover.py", ("test_what_may_be_read_but_not_written_is_read",)),
    Trouble("another user's directory, or file", "read, not written; a closed file is a miss",
            "remote/test_directory.py",
            ("test_another_users_directory_is_read_and_not_written",
             "test_what_another_user_may_not_read_is_a_miss")),
    Trouble("a name with several addresses", "all are tried", "remote/test_failover.py",
            ("test_every_address_of_a_name_is_tried",)),
    Trouble("a conversation that moves between machines", "the prompt tokens of one machine",
            "engine/test_moving.py", ("test_a_walk_over_three_machines_has_the_tokens_of_one",)),
    Trouble("another BLAS, mlx-lm or GPU", "another class: nothing is shared",
            "remote/test_opening.py", ("test_what_computes_other_numbers_is_another_class",)),
    Trouble("503 `SlowDown`", "asked once more within the time", "remote/test_s3.py",
            ("test_a_throttled_call_succeeds_in_its_time",)),
    Trouble("a bucket of any size", "swept by pages; deleted in one request for 256 objects",
            "remote/test_s3.py",
            ("test_a_janitor_lists_by_pages", "test_many_are_deleted_in_one_request")),
    Trouble("deleting while a share is not mounted and its mount point can be written to",
            "the deletion waits for the share", "remote/test_deleter.py",
            ("test_a_deletion_waits_for_a_share_that_is_not_mounted",)),
    Trouble("two versions of Keepwarm while a fleet is upgraded",
            "what the newer one wrote is a miss for the older, and stays", "remote/test_tier.py",
            ("test_two_versions_of_keepwarm_share_a_tier",)),
)  # fmt: skip


def test_every_trouble_has_its_tests():
    for trouble in TROUBLES:
        source = (PAGE.parents[2] / "tests" / trouble.file).read_text()
        assert all(f"def {name}(" in source for name in trouble.tests), trouble.name


@pytest.fixture(scope="module")
def computed(tiny_model):
    return Computed(tiny_model("llama"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def patience(monkeypatch):
    """Sets deadlines: long ones that a busy machine keeps too, and short ones for what hangs."""

    def set_deadlines(seconds):
        monkeypatch.setattr("keepwarm.remote.tier.ASK_S", seconds)
        monkeypatch.setattr("keepwarm.cache.restore.restorer.MIN_READ_S", seconds, raising=False)
        monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", seconds)

    monkeypatch.setattr("keepwarm.cache.restore.restorer.MIN_LOAD_SHARE", 0.0)
    set_deadlines(SOON)
    return set_deadlines


@pytest.fixture
def scene(request, places, tmp_path, computed, patience):
    if request.param == "redis":
        server = request.getfixturevalue("server")
        made = Scene("redis", server.url, server, computed)
        yield made
        made.close()
        return
    (tmp_path / "place").mkdir()
    with places[request.param](tmp_path / "place") as url:
        made = Scene(MORE.get(request.param, request.param), url, None, computed)
        yield made
        made.close()


CELLS = [
    pytest.param(
        place,
        fault,
        id=f"{fault.name}-{place}",
        marks=[] if fault.always == place else [pytest.mark.soak],
    )
    for fault in FAULTS
    for place in (*COLUMNS, *MORE)
    if fault.cell(MORE.get(place, place))
]


@pytest.mark.parametrize(("scene", "fault"), CELLS, indirect=["scene"])
def test_the_outcome_is_as_the_page_says(scene, fault, patience):
    """Tokens equal a cold run's while the fault lasts, and all is found again afterwards."""
    cell, others = fault.cell(scene.kind), len(OTHER) - 1
    assert (scene.reuse(PROMPT), scene.reuse(OTHER)) == (ALL, others)
    scene.forget()
    undo = fault.damage(scene)
    try:
        patience(SHORT if fault.hangs else SOON)
        assert scene.reuse(PROMPT) == cell.prompt
        assert scene.reuse(OTHER) == (others if cell.is_stored else 0)
    finally:
        patience(SOON)
        if undo is not None:
            undo()
    assert recovers(scene), "it is not found again"


def recovers(scene):
    """Soon: what is bad is deleted when it is bad twice, and put again by its first owner."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        scene.forget()
        scene.share()
        if scene.reuse(PROMPT) == ALL and scene.reuse(OTHER) == len(OTHER) - 1:
            return True
        time.sleep(0.01)
    return False


BEGIN, END = "<!-- faults -->\n", "<!-- /faults -->\n"


def page(text: str) -> str:
    """The page with the table of faults in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| fault | Redis, Valkey | directory | S3 |\n|---|---|---|---|\n"
    rows = (
        f"| {fault.name} | {' | '.join(outcome(fault.cell(kind)) for kind in COLUMNS)} |\n"
        for fault in FAULTS
    )
    more = "\n| what operators meet | what comes of it |\n|---|---|\n"
    others = (
        f"| {one.name} | {one.outcome} ([tests](../../tests/{one.file})) |\n" for one in TROUBLES
    )
    return before + BEGIN + head + "".join([*rows, more, *others]) + END + after


def outcome(cell: Cell | None) -> str:
    return cell.outcome if cell else "n/a"


def test_the_page_is_current():
    text = PAGE.read_text()
    assert BEGIN in text
    assert text == page(text), "run: python -m tests.hostile.test_shared_faults"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

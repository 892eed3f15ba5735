"""Two machines with one cache: two engines with homes of their own, and a place they share."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import mlx.core as mx
import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.compression import decode_record, undo_code
from keepwarm.remote.records import list_classes
from tests.contract.shared import names_in
from tests.kit.engines import Exam, FedCounter, ask, engine_on, held
from tests.kit.models import tiny
from tests.kit.places import KINDS
from tests.kit.redis_server import redis_server
from tests.kit.runs import prompt_of

SOON = 60.0  # seconds
ARCHITECTURES = ["llama", "gemma3_text", "qwen3_next", "mamba"]


@pytest.fixture(params=KINDS)
def remote(request, places, tmp_path_factory):
    """The address of an empty place."""
    with places[request.param](tmp_path_factory.mktemp("shared")) as url:
        yield url


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines that a busy machine keeps too: hanging is a failure, and slowness is not."""
    monkeypatch.setattr("keepwarm.remote.opening.START_S", SOON)
    monkeypatch.setattr("keepwarm.remote.uploader.CLOSE_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.ASK_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.MAX_ASK_SHARE", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", SOON)
    monkeypatch.setattr("keepwarm.cache.restore.restorer.MIN_READ_S", SOON)


def machine(model, home, remote="", settings=(), **options):
    environment = {"KEEPWARM_REMOTE": remote, **dict(settings)}
    return engine_on(model, home, environment=environment, **options)


def run(engine, prompt, n=4, **options):
    return engine.submit(ask(prompt, n, **options)).result()


def use(engine, *prompts, times=2):
    """The second use shares them, and the third what the second has learned to keep."""
    for prompt in prompts * times:
        run(engine, prompt)


@pytest.mark.parametrize("n_whole", [512, pytest.param(2048, marks=pytest.mark.soak)])
def test_a_second_machine_computes_only_what_is_new(models, tmp_path, remote, n_whole):
    """Whole blocks, however a prompt ends or parts from another, and what a prompt continues: a
    block that was shared with more tokens than the prompt has is not known by its key.
    """
    whole, open_end = prompt_of(n_whole), prompt_of(n_whole + 52, seed=2)
    other = prompt_of(n_whole + 188, seed=3)
    prompts = [whole, open_end, [*other[: n_whole + 88], *prompt_of(20, seed=4)]]
    model, exam = models.of("llama"), Exam(models.module("llama"))
    with machine(model, tmp_path / "a", remote) as a:
        use(a, whole, open_end, other)
    with machine(model, tmp_path / "b", remote) as b:
        for prompt, n_new in zip(prompts, (1, 52, 108), strict=True):
            result = run(b, prompt)
            assert result.receipt.reused == {"shared": len(prompt) - n_new}
            exam.add(prompt, result.choices[0])
    exam.check()


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_turn_is_shared_at_its_end_where_that_is_set(models, tmp_path, remote, at_once):
    """So that it survives its server; else it waits for the second use."""
    model, prompt = models.of("llama"), prompt_of(300)
    settings = {"KEEPWARM_SHARE_AT_ONCE": str(int(at_once))}
    with machine(model, tmp_path / "a", remote, settings) as a:
        answered = [*prompt, *(info.token for info in run(a, prompt).choices[0].tokens)]
        a.wait_until_saved()
        a.lane_of().restorer.share([1]).result(SOON)  # behind all that was offered
        with machine(model, tmp_path / "b", remote) as b:
            reused = run(b, [*answered, 7]).receipt.reused
    assert reused == ({"shared": len(answered)} if at_once else {})


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
def test_what_is_coded_for_a_slow_line_is_restored_token_for_token(models, tmp_path, remote):
    """A model in bf16; to the first machine the line seems slow, and to the second it does not."""
    module, prompt = tiny("llama"), prompt_of(600)
    module.set_dtype(mx.bfloat16)
    model = replace(models.of("llama"), module=FedCounter(module))
    with machine(model, tmp_path / "a", remote) as a:
        speed = a.lane_of().restorer.tiers.shared[0].speed
        speed.bytes_per_s = speed.put_bytes_per_s = 1e4
        use(a, prompt)
        expected = run(a, prompt)
    with closing(open_backend(remote)) as place:
        (compute_class,) = list_classes(place, SOON)
        data = [place.read(one, _new, SOON) for one in names_in(place, compute_class)]
        assert [bytes(one[:7]) for one in data] == [b"kwcoded"] * 3
    with machine(model, tmp_path / "b", remote) as b:
        result = run(b, prompt)
        assert result.receipt.reused == {"shared": 512}
        assert result.choices[0].tokens == expected.choices[0].tokens


def _new(n_bytes):
    return memoryview(bytearray(n_bytes))


def long(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("remote", "architecture", "n_tokens"),
    [
        ("redis", "gemma3_text", 300),
        ("redis", "mamba", 270),
        *(long(kind, name, 563) for kind in KINDS for name in ARCHITECTURES),
        *(long(kind, name, 2100) for kind in KINDS for name in ("gemma3_text", "mamba")),
    ],
    indirect=["remote"],
)
def test_it_computes_no_more_than_the_first_would(models, tmp_path, remote, architecture, n_tokens):
    """Windows and states: the same as from the first machine's disk."""
    prompts = [prompt_of(n_tokens), [*prompt_of(n_tokens - 30), *prompt_of(20, seed=4)]]
    model, exam = models.of(architecture), Exam(models.module(architecture))
    with machine(model, tmp_path / "a", remote) as a:
        use(a, prompts[0], times=3)
    with machine(model, tmp_path / "a") as a:
        expected = [run(a, prompt).receipt.recomputed for prompt in prompts]
    with machine(model, tmp_path / "b", remote) as b:
        results = [run(b, prompt) for prompt in prompts]
    for prompt, result in zip(prompts, results, strict=True):
        exam.add(prompt, result.choices[0])
    exam.check()
    assert [result.receipt.recomputed for result in results] == expected
    assert results[0].receipt.reused == {"shared": n_tokens - 1}


@pytest.mark.parametrize(
    ("remote", "architecture"),
    [
        ("directory", "llama"),
        *(long(kind, name) for kind in KINDS for name in ("llama", "gemma3_text", "mamba")),
    ],
    indirect=["remote"],
)
def test_a_flipped_byte_is_a_miss(models, tmp_path, remote, architecture):
    """In every record: of rows, of windows, of states."""
    prompt = prompt_of(600)
    model, exam = models.of(architecture), Exam(models.module(architecture))
    with machine(model, tmp_path / "a", remote) as a:
        use(a, prompt, times=3)
    with closing(open_backend(remote)) as place:
        names = [
            name
            for compute_class in list_classes(place, SOON)
            for name in names_in(place, compute_class)
        ]
        assert len(names) >= 3
        for name in names:
            data = bytearray(place.read(name, lambda n: memoryview(bytearray(n)), SOON))
            data[-5] ^= 1
            assert place.put(name, [data], SOON, replace=True)
    with machine(model, tmp_path / "b", remote) as b:
        result = run(b, prompt)
        exam.add(prompt, result.choices[0])
        assert result.receipt.reused == {}
        assert b.store.tier_stats()["shared 1"].quarantined >= 1
    exam.check()


@pytest.mark.parametrize("remote", ["directory", long("s3")], indirect=True)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_window_that_is_presumed_and_not_there_is_a_miss(
    models, tmp_path, remote, is_lost, monkeypatch
):
    """Where few requests are left, only its first block and its last are asked for. The prompt
    goes on where the shared one ends.
    """
    shared = prompt_of(1300)
    prompt = [*shared, *prompt_of(700, seed=2)]
    changes = {"sliding_window": 1024}
    model = models.of("gemma3_text", **changes)
    exam = Exam(models.module("gemma3_text", **changes))
    with machine(model, tmp_path / "a", remote) as a:
        use(a, shared, times=3)
    with closing(open_backend(remote)) as place:
        windows = _windows_in(place)
        assert windows.keys() >= {1, 2, 3, 4}
        if is_lost:
            place.delete([windows[2]], SOON)
    monkeypatch.setattr("keepwarm.remote.directory.DirectoryBackend.is_distant", True)
    monkeypatch.setattr("keepwarm.remote.lookup.MAX_REQUESTS", 7)
    with machine(model, tmp_path / "b", remote) as b:
        result = run(b, prompt)
        exam.add(prompt, result.choices[0])
        assert result.receipt.reused == ({} if is_lost else {"shared": 1280})
        n_misses = b.store.tier_stats()["shared 1"].misses
        assert (n_misses > 0) == is_lost, "a read has failed"
    exam.check()


def _windows_in(place):
    """Names of window records of whole blocks, by number."""
    found = {}
    for compute_class in list_classes(place, SOON):
        for name in names_in(place, compute_class):
            header = decode_record(undo_code(place.read(name, _new, SOON))).header
            if header.part is Part.WINDOW and len(header.tokens) == 4 * BLOCK_TOKENS:
                found[header.number] = name
    return found


def test_only_the_callers_and_readers_call_a_shared_place(models, tmp_path, monkeypatch):
    """The thread that owns MLX, which all streams wait for, touches no socket."""
    callers = set()
    for name in ("connect", "sendmsg", "send", "sendall", "recv", "recv_into"):
        plain = getattr(socket.socket, name)

        def watched(self, *args, _plain=plain, **options):
            callers.add(threading.current_thread().name)
            return _plain(self, *args, **options)

        monkeypatch.setattr(socket.socket, name, watched)
    model, prompt = models.of("llama"), prompt_of(600)
    with redis_server(tmp_path) as server:
        with machine(model, tmp_path / "a", server.url) as a:
            use(a, prompt)
        with machine(model, tmp_path / "b", server.url) as b:
            with held(b):  # so that the second loads in the background
                answers = [b.submit(ask(p, 4)) for p in (prompt_of(300, seed=9), prompt)]
            assert answers[1].result().receipt.reused == {"shared": 512}
            answers[0].result()
            server.kill()
            run(b, prompt_of(300, seed=5))
    assert {"MainThread", "keepwarm-remote", "keepwarm-uploader"} <= callers
    assert any(name.startswith(("keepwarm-reader", "keepwarm-background")) for name in callers)
    assert "keepwarm-engine" not in callers


@pytest.mark.parametrize("remote", ["directory"], indirect=True)
def test_what_was_used_once_or_is_not_for_the_disk_stays_here(models, tmp_path, remote):
    model, prompt = models.of("llama"), prompt_of(600)
    with machine(model, tmp_path / "a", remote) as a:
        run(a, prompt_of(600, seed=7))
        for _ in range(2):
            run(a, prompt, policy=Policy.EPHEMERAL)
    with machine(model, tmp_path / "b", remote) as b:
        for tokens in (prompt, prompt_of(600, seed=7)):
            assert run(b, tokens).receipt.reused == {}


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
def test_a_receipt_says_what_another_machine_would_restore(models, tmp_path, remote):
    """As far as is known when the answer ends: it waits for nothing, not even if it is durable."""
    model, prompt = models.of("llama"), prompt_of(600)
    longer = [*prompt, *prompt_of(200, seed=2)]
    with machine(model, tmp_path / "a", remote) as a:
        assert run(a, prompt, policy=Policy.DURABLE).receipt.shared == 0, "its first use"
        _until_shared(a, prompt[:-1])
        assert run(a, longer).receipt.shared == 512, "the rest was used once"
        *_, last = a.requests()
        assert last.receipt.shared == 512
    with machine(model, tmp_path / "b", remote) as b:
        receipt = run(b, prompt).receipt
        assert (receipt.reused, receipt.shared) == ({"shared": 512}, 512)
    with machine(model, tmp_path / "b") as b:
        assert run(b, prompt).receipt.shared is None, "nothing is shared"


def test_what_was_fetched_is_kept_here(models, tmp_path):
    """On disk too, unless the request is ephemeral."""
    model, prompt = models.of("llama"), prompt_of(600)
    with redis_server(tmp_path) as server:
        with machine(model, tmp_path / "a", server.url) as a:
            use(a, prompt)
        with machine(model, tmp_path / "b", server.url) as b:
            assert run(b, prompt).receipt.reused == {"shared": 512}
        with machine(model, tmp_path / "c", server.url) as c:
            assert run(c, prompt, policy=Policy.EPHEMERAL).receipt.reused == {"shared": 512}
    with machine(model, tmp_path / "b") as b:
        assert run(b, prompt).receipt.reused == {"disk": 599}
    with machine(model, tmp_path / "c") as c:
        assert run(c, prompt).receipt.reused == {}


@pytest.mark.parametrize("remote", ["directory"], indirect=True)
def test_a_pinned_agent_is_shared_at_once(models, tmp_path, remote):
    model, prompt = models.of("llama"), prompt_of(300)
    with machine(model, tmp_path / "a", remote) as a:
        run(a, prompt_of(20, seed=8), agent="kept")
        a.wait_until_saved()
        a.store.on_disk.agents.pin("kept")
        run(a, prompt, agent="kept")
        a.wait_until_saved()
    with machine(model, tmp_path / "b", remote) as b:
        assert run(b, prompt).receipt.reused == {"shared": 256}


class JumpingClock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    "remote",
    ["directory", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("redis", "s3"))],
    indirect=True,
)
def test_a_load_that_falls_behind_is_left_and_what_has_arrived_is_kept(
    models, tmp_path, remote, monkeypatch
):
    """Here when one block has arrived; the rest is computed, and nobody is asked for it."""
    model, exam, prompt = models.of("llama"), Exam(models.module("llama")), prompt_of(800)
    with machine(model, tmp_path / "a", remote) as a:
        use(a, prompt)
    clock, names = JumpingClock(), []
    monkeypatch.setattr(
        "keepwarm.cache.restore.restorer.Plan.deadline", lambda plan: CallDeadline(1.0, clock)
    )
    with machine(model, tmp_path / "b", remote) as b:
        (tier,) = b.lane_of().restorer.tiers.shared
        b.lane_of().restorer.reader._pool = ThreadPoolExecutor(1)  # one after the other
        fetch = tier.backend.fetch

        def fetch_one(name, *args):
            names.append(name)
            clock.now += 2.0
            return fetch(name, *args)

        monkeypatch.setattr(tier.backend, "fetch", fetch_one)
        result = run(b, prompt)
        assert result.receipt.reused == {"memory": 256}
        assert len(names) == 1
        assert not tier.is_open
        exam.add(prompt, result.choices[0])
    exam.check()


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
def test_other_numbers_are_used_only_where_that_is_wanted_and_said(
    models, tmp_path, remote, monkeypatch
):
    model, prompt, more = models.of("llama"), prompt_of(300), prompt_of(250, seed=2)

    def of_class(name):
        monkeypatch.setattr("keepwarm.remote.opening.compute_class", lambda _: name)

    anything = {"KEEPWARM_SHARE_NUMERICS": "any"}
    of_class("cuda-mlx-0.1")
    with machine(model, tmp_path / "a", remote) as a:
        use(a, prompt)
    of_class("metal-mlx-0.1")
    with machine(model, tmp_path / "b", remote, settings=anything) as b:
        result = run(b, prompt)
        assert result.receipt.reused == {"shared": 256}
        assert result.receipt.inexact == ("numerics", "unverified")
        use(b, [*prompt, *more])
    with machine(model, tmp_path / "b") as b:  # its store stays so
        assert run(b, prompt).receipt.inexact == ("numerics", "unverified")
    with machine(model, tmp_path / "c", remote) as c:
        result = run(c, [*prompt, *more])
        assert result.receipt.reused == {}, "it was computed elsewhere, or on top of that"
        assert result.receipt.exact
    with machine(model, tmp_path / "d", remote, settings=anything) as d:
        assert run(d, [*prompt, *more]).receipt.reused == {"shared": 512}


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
def test_a_forgotten_agent_is_gone_from_what_machines_share(models, tmp_path, remote):
    model, prompt, other = models.of("llama"), prompt_of(600), prompt_of(500, seed=3)
    with machine(model, tmp_path / "a", remote) as a:
        for _ in range(2):
            run(a, prompt, agent="coder")
            run(a, other, agent="other")
        a.wait_until_saved()
        _until_shared(a, prompt, other)
        a.forget("coder")
        assert a.store.unreached() == []
    with machine(model, tmp_path / "b", remote) as b:
        assert run(b, prompt).receipt.reused == {}
        assert run(b, other).receipt.reused == {"shared": 256}


def _until_shared(engine, *prompts):
    for prompt in prompts:
        tried = engine.lane_of().restorer.share(prompt)
        tried.result(SOON)

"""Two machines with one cache: two engines with homes of their own, and a place they share."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from keepwarm.cache.policy import Policy
from tests.kit.engines import Exam, ask, engine_on, held
from tests.kit.redis_server import redis_server
from tests.kit.runs import prompt_of

SOON = 60.0  # seconds
ARCHITECTURES = ["llama", "gemma3_text", "qwen3_next", "mamba"]


@contextmanager
def redis(directory):
    with redis_server(directory) as server:
        yield server.url


@contextmanager
def directory(path):
    yield path.as_uri()


PLACES = {"redis": redis, "directory": directory}


@pytest.fixture(params=PLACES)
def remote(request, tmp_path_factory):
    """The address of an empty place."""
    with PLACES[request.param](tmp_path_factory.mktemp("shared")) as url:
        yield url


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines that a busy machine keeps too: hanging is a failure, and slowness is not."""
    monkeypatch.setattr("keepwarm.cache.shared.opening.START_S", SOON)
    monkeypatch.setattr("keepwarm.cache.shared.sharing.CLOSE_S", SOON)
    monkeypatch.setattr("keepwarm.cache.restore.planning.ASK_S", SOON)
    monkeypatch.setattr("keepwarm.store.remote.tier.MIN_READ_S", SOON)


def machine(model, home, remote="", **options):
    return engine_on(model, home, environment={"KEEPWARM_REMOTE": remote}, **options)


def run(engine, prompt, n=4, **options):
    return engine.submit(ask(prompt, n, **options)).result()


def use(engine, *prompts, times=2):
    """The second use shares them, and the third what the second has learned to keep."""
    for prompt in prompts * times:
        run(engine, prompt)


def test_a_second_machine_computes_only_what_is_new(models, tmp_path, remote):
    """Of prompts that end with a block, inside one, and that part inside one."""
    whole, open_end, other = prompt_of(512), prompt_of(563, seed=2), prompt_of(700, seed=3)
    prompts = [whole, open_end, [*other[:600], *prompt_of(20, seed=4)]]
    model, exam = models.of("llama"), Exam(models.module("llama"))
    with machine(model, tmp_path / "a", remote) as a:
        use(a, whole, open_end, other)
    with machine(model, tmp_path / "b", remote) as b:
        for prompt, n_new in zip(prompts, (1, 1, 20), strict=True):
            result = run(b, prompt)
            assert result.receipt.reused == {"shared": len(prompt) - n_new}
            exam.add(prompt, result.choices[0])
    exam.check()


@pytest.mark.parametrize(
    ("architecture", "n_tokens"),
    [
        ("gemma3_text", 300),
        ("mamba", 270),
        *(pytest.param(name, 563, marks=pytest.mark.soak) for name in ARCHITECTURES),
    ],
)
@pytest.mark.parametrize("remote", ["redis"], indirect=True)
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


def test_a_flipped_byte_is_a_miss(models, tmp_path):
    prompt, place = prompt_of(600), tmp_path / "shared"
    place.mkdir()
    model, exam = models.of("llama"), Exam(models.module("llama"))
    with machine(model, tmp_path / "a", place.as_uri()) as a:
        use(a, prompt)
    records = [path for path in place.rglob("*.d") if path.is_file()]
    assert len(records) == 3
    for path in records:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    with machine(model, tmp_path / "b", place.as_uri()) as b:
        result = run(b, prompt)
        exam.add(prompt, result.choices[0])
        assert result.receipt.reused == {}
        assert b.store.tier_stats()["shared 1"].quarantined >= 1
    exam.check()


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
            assert answers[1].result().receipt.reused == {"shared": 599}
            answers[0].result()
            server.kill()
            run(b, prompt_of(300, seed=5))
    assert {"MainThread", "keepwarm-remote", "keepwarm-sharer"} <= callers
    assert any(name.startswith(("keepwarm-reader", "keepwarm-background")) for name in callers)
    assert "keepwarm-engine" not in callers


def test_what_was_used_once_or_is_not_for_the_disk_stays_here(models, tmp_path, remote):
    model, prompt = models.of("llama"), prompt_of(600)
    with machine(model, tmp_path / "a", remote) as a:
        run(a, prompt_of(600, seed=7))
        for _ in range(2):
            run(a, prompt, policy=Policy.EPHEMERAL)
    with machine(model, tmp_path / "b", remote) as b:
        for tokens in (prompt, prompt_of(600, seed=7)):
            assert run(b, tokens).receipt.reused == {}


def test_what_was_fetched_is_kept_here(models, tmp_path):
    """On disk too, unless the request is ephemeral."""
    model, prompt = models.of("llama"), prompt_of(600)
    with redis_server(tmp_path) as server:
        with machine(model, tmp_path / "a", server.url) as a:
            use(a, prompt)
        with machine(model, tmp_path / "b", server.url) as b:
            assert run(b, prompt).receipt.reused == {"shared": 599}
        with machine(model, tmp_path / "c", server.url) as c:
            assert run(c, prompt, policy=Policy.EPHEMERAL).receipt.reused == {"shared": 599}
    with machine(model, tmp_path / "b") as b:
        assert run(b, prompt).receipt.reused == {"disk": 599}
    with machine(model, tmp_path / "c") as c:
        assert run(c, prompt).receipt.reused == {}


def test_requests_at_the_same_time_fetch_every_record_once(models, tmp_path):
    prefix = prompt_of(512)
    prompts = [[*prefix, *prompt_of(20 + n, seed=n)] for n in range(4)]
    model, exam = models.of("llama"), Exam(models.module("llama"))
    with redis_server(tmp_path) as server:
        with machine(model, tmp_path / "a", server.url) as a:
            use(a, prefix)
        with machine(model, tmp_path / "b", server.url) as b:
            before = server.n_reads()
            with held(b):
                answers = [b.submit(ask(prompt, 3)) for prompt in prompts]
            for prompt, answer in zip(prompts, answers, strict=True):
                exam.add(prompt, answer.result().choices[0])
            assert server.n_reads() - before == 2
    exam.check()


def test_a_place_that_hangs_or_is_gone_changes_no_answer(models, tmp_path, monkeypatch):
    model, exam = models.of("llama"), Exam(models.module("llama"))
    prompts = [prompt_of(300, seed=seed) for seed in range(6)]
    with redis_server(tmp_path) as server, machine(model, tmp_path / "a", server.url) as a:
        (tier,) = a.lane_of().manager.tiers.shared
        server.pause()
        monkeypatch.setattr("keepwarm.cache.restore.planning.ASK_S", 0.05)
        try:
            for prompt in prompts[:4]:
                exam.add(prompt, run(a, prompt).choices[0])
            assert tier.breaker.is_open
            assert a.store.tier_stats()["shared 1"].errors == 3, "the fourth has asked nobody"
        finally:
            server.go_on()
        server.kill()
        exam.add(prompts[4], run(a, prompts[4]).choices[0])
        server.start()
        monkeypatch.setattr("keepwarm.cache.restore.planning.ASK_S", SOON)
        until = time.monotonic() + SOON
        while tier.breaker.is_open:
            assert time.monotonic() < until
            time.sleep(0.02)
        exam.add(prompts[5], run(a, prompts[5]).choices[0])
        assert a.store.tier_stats()["shared 1"].errors == 3
    exam.check()


def test_a_pinned_agent_is_shared_at_once(models, tmp_path, remote):
    model, prompt = models.of("llama"), prompt_of(300)
    with machine(model, tmp_path / "a", remote) as a:
        run(a, prompt_of(20, seed=8), agent="kept")
        a.settle()
        a.store.on_disk.agents.pin("kept")
        run(a, prompt, agent="kept")
        a.settle()
    with machine(model, tmp_path / "b", remote) as b:
        assert run(b, prompt).receipt.reused == {"shared": 299}

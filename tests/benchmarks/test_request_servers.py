"""`benchmarks.requests` on servers: one that it starts, and a running one given by its URL."""

import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.requests import suite
from benchmarks.requests.report.results import Note, Results
from benchmarks.requests.run import QUICK
from benchmarks.requests.targets import make, unwound_by_signals
from benchmarks.requests.workloads.streams import background_streams

from benchmarks import decode, engine, rows, shaped
from keepwarm import config
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import serve

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SIZES = replace(QUICK, samples=1, lengths=(64,))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), n_context=16384)


@pytest.fixture(scope="module")
def make_run(model, tmp_path_factory):
    return suite.run_factory(model, tmp_path_factory.mktemp("bench"), SIZES)


@pytest.fixture
def url(model, tmp_path):
    """A server that requires a key."""
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, api_keys="secret")
    with serve(load(str(model), settings), settings) as live:
        yield f"{live.url}/v1"


@pytest.fixture
def measure(url, make_run, tmp_path):
    """Run workloads on that server, under a name."""

    def run(*workloads):
        target = make(f"mine={url}", tmp_path, tmp_path)
        records = suite.run_all([(name, target) for name in workloads], make_run)
        target.close()
        return Results("", "", "tiny", SIZES.samples, {}, {"mine": target.about}, records)

    return run


def test_any_base_url_can_be_measured(measure, monkeypatch):
    """Under its name and with its key; restarts are skipped, and no goal is checked."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    found = measure("agents", "lengths", "streams")
    assert {record.target for record in found.records} == {"mine"}
    assert found.notes == [Note("lengths", "mine", "cannot be restarted by the bench")]
    (again,) = found.of("lengths", "cached, identical prompt again")
    assert again.samples == (63,)
    assert [series.what for series in found.series if "restart" in series.what] == []
    assert min(series.median for series in found.of("streams", "throughput")) > 0
    prefills = {c.what: c for c in found.claims if c.what.startswith("times the shared")}
    assert all(0.9 < claim.value <= 1.02 for claim in prefills.values())
    assert {claim.holds for claim in found.claims} == {None}


def test_a_server_that_refuses_is_a_note(measure, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    (note,) = measure("late").records
    assert "401" in note.text


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["keepwarm", "engine"])
def test_tiers_that_machines_share_are_left_alone(kind, model, tmp_path, monkeypatch):
    """A benchmark is about this machine, whatever the environment and config.toml name."""
    file, variable = tmp_path / "from-file", tmp_path / "from-variable"
    for place in (file, variable):
        place.mkdir()
    (tmp_path / "config.toml").write_text(f'remote = "{file.as_uri()}"')
    monkeypatch.setenv("KEEPWARM_HOME", str(tmp_path))
    for named, used in ((None, file), (variable.as_uri(), variable)):
        monkeypatch.delenv("KEEPWARM_REMOTE", raising=False)
        if named:
            monkeypatch.setenv("KEEPWARM_REMOTE", named)
        assert config.load().remotes == [used.as_uri()]
        with suite.started([make(kind, model, tmp_path)]):
            assert list(used.iterdir()) == []


def test_servers_are_asked_first_in_turn():
    made = {name: SimpleNamespace(name=name) for name in ("one", "two", "own")}
    names = ["late", "chat", "overhead", "streams"]
    steps = suite.in_turn(names, [made["one"], made["two"]], [made["own"]])
    assert [(name, target.name) for name, target in steps] == [
        *[("late", "one"), ("late", "two"), ("chat", "two"), ("chat", "one")],
        *[("overhead", "own"), ("streams", "one"), ("streams", "two")],
    ]


def test_a_bench_that_is_told_to_end_unwinds():
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with unwound_by_signals():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(SystemExit):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


HANGS = """
import threading
from benchmarks.requests.run import ask_together
from benchmarks.requests.targets import unwound_by_signals

def hang():
    print("asked\\n", end="", flush=True)
    threading.Event().wait()

with unwound_by_signals():
    try:
        ask_together([hang, hang])
    finally:
        print("unwound", flush=True)
"""


def test_a_bench_that_is_told_to_end_does_not_wait_for_its_requests():
    command, root = [sys.executable, "-c", HANGS], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as bench:
        try:
            assert [bench.stdout.readline() for _ in range(2)] == ["asked\n"] * 2
            bench.terminate()
            assert bench.communicate(timeout=30)[0] == "unwound\n"
        finally:
            bench.kill()
    assert bench.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("program", "work"),
    [(decode, "measure"), (engine, "measure"), (rows, "measure"), (shaped, "build")],
)
def test_a_program_that_is_told_to_end_leaves_no_folder(program, work, monkeypatch, tmp_path):
    def be_told(*_):
        assert list(tmp_path.iterdir())
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(program, work, be_told)
    with pytest.raises(SystemExit):
        program.main([])
    assert list(tmp_path.iterdir()) == []


class Stuck:
    """Sends a few pieces of text, then nothing."""

    def __init__(self):
        self.let_go = threading.Event()

    def ask(self, ask):
        if ask.max_tokens == 1:
            return SimpleNamespace(prompt_tokens=9)
        for _ in range(QUICK.pieces_before + 1):
            ask.on_text(0.0)
        return self.let_go.wait()


def test_an_error_beside_a_stream_does_not_wait_for_its_end(make_run):
    target = Stuck()
    run = make_run("late", target, lambda _: None)
    with pytest.raises(KeyError), background_streams(run) as (stream,):
        raise KeyError
    assert not stream.reply.done()
    target.let_go.set()
    stream.reply.result()

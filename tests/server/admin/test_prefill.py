"""Prefill elsewhere: two servers with homes of their own, and a directory that they share."""

import shutil
import time
from contextlib import contextmanager

import pytest

from keepwarm.server.app import create_app
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from keepwarm.store.disk.disk import DiskTier
from tests.kit.engines import Exam, ask, engine_on
from tests.kit.runs import prompt_of
from tests.server.conftest import running

SOON = 60.0  # seconds
TALK = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 20}]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines that a busy machine keeps too, and no choice that depends on its speed."""
    monkeypatch.setattr("keepwarm.remote.health.RemoteSpeed.load_s", lambda *_: 0.0)
    monkeypatch.setattr("keepwarm.remote.opening.START_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.ASK_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", SOON)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@contextmanager
def machine(model, home, place=None):
    """A server, and its engine."""
    remote = "" if place is None else place.as_uri()
    with engine_on(model, home, environment={"KEEPWARM_REMOTE": remote}) as engine:
        settings = engine.store.settings
        app = create_app(Models(EngineHost(engine, "tiny"), settings), settings)
        with running(app, settings) as live:
            yield live, engine


def prefill(live, path="", status=200, **body):
    answer = live.post(f"/v1/cache/prefill{path}", body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "architecture",
    ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gemma3_text", "mamba"))],
)
def test_one_machine_computes_and_the_other_restores(models, tmp_path, place, architecture):
    """After a single call, for rows, windows and states; messages as they will be rendered."""
    model, exam, tokens = models.of(architecture), Exam(models.module(architecture)), prompt_of(300)
    with machine(model, tmp_path / "a", place) as (a, _):
        first = prefill(a, "/completions", prompt=tokens)
        n_places = [first[name] for name in ("prompt_tokens", "computed", "kept", "shared")]
        assert n_places == [300, 300, 299, 299]
        assert first["keepwarm"]["shared"] == 299
        again = prefill(a, "/completions", prompt=tokens)
        assert (again["computed"], again["shared"]) == (1, 299)
        talk = prefill(a, messages=TALK)
        assert talk["shared"] == talk["prompt_tokens"] - 1 > 256
    with machine(model, tmp_path / "b", place) as (live, b):
        result = b.submit(ask(tokens, 4)).result()
        said = live.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 2}).json()
        points = live.get("/v1/dashboard/saved").json()["points"]
        shown = live.get("/v1/cache").json()["tiers"]["shared 1"]
    assert (shown["hits"], shown["misses"], shown["errors"]) == (2, 0, 0)
    assert sum(point["shared"] for point in points) == 299 + talk["shared"]
    assert result.receipt.reused == {"shared": 299}
    assert said["keepwarm"]["reused"] == {"shared": talk["shared"]}
    assert said["keepwarm"]["shared"] == talk["shared"]
    exam.add(tokens, result.choices[0])
    exam.check()


def test_a_prefill_ends_when_the_prompt_is_on_disk(models, tmp_path, place, monkeypatch):
    """Whatever the order in which it is shared and written."""
    put = DiskTier.put

    def slow(tier, record):
        time.sleep(0.2)
        return put(tier, record)

    monkeypatch.setattr(DiskTier, "put", slow)
    with machine(models.of("llama"), tmp_path / "a", place) as (a, _):
        found = prefill(a, "/completions", prompt=prompt_of(300))
    assert found["kept"] == 299
    assert found["keepwarm"]["durable"]


def test_what_cannot_be_shared_is_refused_before_it_is_computed(models, tmp_path, place):
    """But a place that is gone is reported."""
    model, tokens = models.of("llama"), prompt_of(300)
    with machine(model, tmp_path / "a") as (a, _):
        refused = prefill(a, "/completions", prompt=tokens, status=400)
        assert "set `remote`" in refused["error"]["message"]
    with machine(model, tmp_path / "b", place) as (b, _):
        wishes = {"cache": "ephemeral"}
        refused = prefill(b, "/completions", prompt=tokens, keepwarm=wishes, status=400)
        assert "policy ephemeral" in refused["error"]["message"]
        assert model.module.prefilled == 0
        shutil.rmtree(place)
        place.touch()
        told = prefill(b, "/completions", prompt=tokens)
        assert (told["computed"], told["kept"], told["shared"]) == (300, 299, 0)

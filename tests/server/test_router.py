"""Two servers with one cache behind a stock cache-aware router; one of them goes away."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing

import httpx
import pytest
import yaml

from keepwarm.concurrency import CallError
from keepwarm.remote.addresses import open_backend
from tests.kit.redis_server import free_port
from tests.kit.router import EXAMPLES, fleet, router
from tests.kit.waiting import wait_until
from tests.server.admin.test_prefill import machine
from tests.server.processes import PATIENT
from tests.server.router_soak import MOST_COMPUTED, measure

pytestmark = pytest.mark.linux  # the router is published for no other system
SOON = 60.0  # seconds
N_ANSWER = 6


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines that a busy machine keeps too: hanging is a failure, and slowness is not."""
    monkeypatch.setattr("keepwarm.remote.opening.START_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.ASK_S", SOON)
    monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", SOON)
    monkeypatch.setattr("keepwarm.remote.health.RemoteSpeed.load_s", lambda *_: 0.0)


def stable_token(tokenizer):
    """A token that its text is tokenised to again: only then is an answer known on the other
    machine, which has not generated it.
    """
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token] * N_ANSWER)
        if text.isalpha() and tokenizer.encode(text) == [token] * N_ANSWER:
            return token
    raise AssertionError


def check(talks, n_before):
    """Nothing but new tokens before one server went; then no more than what was used only once."""
    turns = [turn for talk in talks for turn in talk.turns[:n_before]]
    assert sum(t.recomputed for t in turns) <= 1.05 * sum(t.n_new for t in turns)
    moved = 0
    for talk in talks:
        shared, _, turn = talk.turns[n_before - 2 : n_before + 1]
        n_shared = shared.n_prompt + shared.n_answer
        assert sum(turn.reused.values()) >= n_shared
        moved += "shared" in turn.reused
    assert moved, "no conversation has changed its server"
    for talk in talks:
        for turn in talk.turns[n_before + 1 :]:
            assert turn.recomputed <= 1.05 * turn.n_new


def test_a_session_goes_on_where_it_is_warm_and_survives_its_server(models, tmp_path):
    """4 sessions: 2 turns over two servers, one more over the one that is left."""
    example, model = fleet(), models.of("llama")
    place = tmp_path / "shared"
    place.mkdir()
    talks = [example.begun(number, n_rules=4) for number in range(4)]
    options = {"max_tokens": N_ANSWER, "logit_bias": {stable_token(model.tokenizer): 100}}
    with ExitStack() as stack:
        second = stack.enter_context(machine(model, tmp_path / "b", place))
        with machine(model, tmp_path / "a", place) as first:
            servers = [first, second]
            url = stack.enter_context(router([live.url for live, _ in servers], tmp_path / "log"))
            asyncio.run(example.run(url, talks, 2, **options))
            for _, engine in servers:
                assert engine.stats().counters["finished"], "both serve"
                engine.wait_until_saved()
                engine.lane_of().restorer.share([1]).result(SOON)  # behind all others
        asyncio.run(example.run(url, talks, 1, **options))
    check(talks, 2)


@pytest.mark.soak
def test_sixteen_sessions_of_the_default_model(tmp_path):
    """16 sessions, 6 turns each, over two processes; one is killed after the third turn."""
    run = measure(tmp_path, command=PATIENT)
    check(run.talks, 3)
    assert run.n_computed <= MOST_COMPUTED * run.n_new


def test_the_example_runs_through_the_router_with_a_key(serving, tmp_path, monkeypatch, capsys):
    """As in the compose file, whose servers have a file of keys."""
    options = ["--sessions", "2", "--turns", "2", "--max-tokens", "4"]
    with serving(api_keys="secret") as live, router([live.url], tmp_path / "log") as url:
        monkeypatch.setattr(sys, "argv", ["fleet.py", url, *options])
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        fleet().main()
        monkeypatch.delenv("OPENAI_API_KEY")
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            fleet().main()
    assert "4 turns of 2 conversations" in capsys.readouterr().out


def test_every_service_of_the_compose_file_is_pinned_watched_and_restarted():
    services = yaml.safe_load((EXAMPLES / "fleet" / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        is_pinned = re.search(r":\d+\.\d+\.\d+(-\w+)?(@sha256:\w+)?$", service["image"])
        assert is_pinned or service["image"] == "keepwarm", name
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name


def test_the_valkey_of_the_compose_file_takes_its_password(tmp_path):
    """With the shell line that is printed, and its health check."""
    valkey = yaml.safe_load((EXAMPLES / "fleet" / "compose.yaml").read_text())["services"]["valkey"]
    port, beside = free_port(), tmp_path / "bin"
    beside.mkdir()
    for name in ("server", "cli"):
        found = shutil.which(f"valkey-{name}") or shutil.which(f"redis-{name}")
        assert found, "the suite needs a Redis"
        (beside / f"valkey-{name}").symlink_to(found)
    shell, option, line, *words = [word.replace("$$", "$") for word in valkey["entrypoint"]]
    path = {"PATH": f"{beside}:{os.environ['PATH']}", "REDISCLI_AUTH": "secret"}
    command = [shell, option, line, *words, *valkey["command"], "--port", str(port)]
    check = valkey["healthcheck"]["test"][1].replace("valkey-cli", f"valkey-cli -p {port}")
    process = subprocess.Popen(command, env=path, cwd=tmp_path)
    try:
        wait_until(
            lambda: subprocess.run(["sh", "-c", check], env=path, check=False).returncode == 0
        )
        wrong = open_backend(f"redis://127.0.0.1:{port}", "wrong")
        with closing(wrong), pytest.raises(CallError, match="WRONGPASS"):
            wrong.sizes(["a/x.d"], SOON)
        with closing(open_backend(f"redis://127.0.0.1:{port}", "secret")) as blobs:
            assert blobs.put("a/x.d", [b"x"], SOON)
    finally:
        process.terminate()
        process.wait()

"""What the views show: progress, cancelling, log lines, status, clients, settings."""

import threading
from dataclasses import replace

import pytest

from keepwarm.cache.restore.writing import WriteStats
from keepwarm.engine.live import LiveStats
from keepwarm.engine.stats import Stats
from keepwarm.server.dashboard.routes import condition_out, totals_out
from keepwarm.server.http.keys import Viewer
from keepwarm.store.counts import PromptCounts
from keepwarm.store.tier import SharedStats, TierStats
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.request import Request, Sampling
from tests.kit.waiting import wait_until
from tests.server.dashboard.test_dashboard import ADMIN, LONG, A, B, ask, show


@pytest.fixture(scope="module")
def keyed(serving, tmp_path_factory):
    """A server with two named keys and an admin key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("alice = a\nbob = b\n")
    file.chmod(0o600)
    with serving(api_keys=f"@{file}", admin_key="admin") as live:
        yield live


# Requests.


def test_a_prompt_is_seen_being_prefilled(live, monkeypatch):
    """The bar is not full before the work is done."""
    engine = live.host.engine
    monkeypatch.setattr(engine._scheduler.slice_sizer, "max_slice", 16)  # who looks may be late
    messages = [{"role": "user", "content": "Prefilled slowly. " * 200}]
    answer = engine.submit(Request(messages=messages, sampling=Sampling(max_tokens=1)))
    seen = []

    def watch():  # between two slices, on the engine's thread
        seen.extend(entry for entry in engine.requests() if entry.state == "prefilling")

    reader = threading.Thread(target=answer.result)
    reader.start()
    while reader.is_alive():
        engine.call(watch).result()
    parts = [(entry.processed_tokens, entry.prompt_tokens) for entry in seen]
    assert any(0 < n < whole for n, whole in parts)
    assert [n for n, _ in parts] == sorted(n for n, _ in parts)
    ended = engine.requests()[-1]
    assert (ended.state, ended.processed_tokens) == ("done", ended.prompt_tokens)


def started(live, agent, headers, text="Count."):
    """A thread that reads an endless answer, once that has begun."""
    ends = live.host.engine.model.tokenizer.eos_token_ids
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8000,
        "logit_bias": {str(end): -100 for end in ends},
    }
    named = {**headers, "X-Keepwarm-Agent": agent}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(live.post("/v1/chat/completions", body, **named))
    )
    thread.start()
    wait_until(lambda: bool(show(live, "now", **headers)["running"]))
    return thread, answers


@pytest.mark.parametrize("canceller", [A, ADMIN])
def test_a_request_is_cancelled_by_its_key_or_the_admin(keyed, canceller):
    thread, answers = started(keyed, "counter", A)
    (entry,) = show(keyed, "now", **A)["running"]
    path = f"/v1/dashboard/requests/{entry['number']}/cancel"
    assert keyed.post(path, {}, **B).status_code == 404
    assert keyed.post(path, {}).status_code == 401
    assert keyed.post(path, {}, Origin="http://evil.example", **A).status_code == 403
    assert thread.is_alive()
    assert keyed.post(path, {}, **canceller).json()["cancelled"] is True
    thread.join(300)
    assert answers[0].status_code == 499
    ended = show(keyed, "requests", **A)["data"][0]
    assert (ended["number"], ended["state"]) == (entry["number"], "cancelled")
    assert ended["error"] == "The request was cancelled."  # others may quote the prompt
    assert show(keyed, "requests", **ADMIN)["data"][0]["error"] == ""
    assert keyed.post(path, {}, **canceller).json()["cancelled"] is False


def test_a_request_has_its_line_of_the_log(keyed):
    ask(keyed, LONG, "logged", **A)
    (entry,) = [one for one in show(keyed, "requests", **A)["data"] if one["agent"] == "logged"]
    wait_until(lambda: show(keyed, "requests", **A)["data"][0]["log"] is not None)
    line = show(keyed, "requests", **A)["data"][0]["log"]
    for part in (f"id={entry['request_id']}", "key=alice", "agent=logged", "status=200"):
        assert part in line.split()
    assert "quick" not in line
    admins = show(keyed, "requests?limit=1", **ADMIN)["data"][0]
    assert (admins["log"], admins["key"]) == (line, "alice")
    assert show(keyed, "requests", **B)["data"] == []


def test_a_request_that_is_refused_is_shown_with_its_status_and_sentence(keyed):
    before = show(keyed, "saved", **ADMIN)["points"]
    bodies = {
        "empty": {"messages": []},
        "long": {"messages": [{"role": "user", "content": LONG * 200}]},
        "wrong": {"messages": "Hello."},
    }
    answers = {name: keyed.post("/v1/chat/completions", body, **A) for name, body in bodies.items()}
    assert {answer.status_code for answer in answers.values()} == {400}
    nobody = keyed.post("/v1/chat/completions", bodies["wrong"])
    asked = keyed.get("/v1/agents/nobody", **A)
    assert (nobody.status_code, asked.status_code) == (401, 404)

    def shown(**headers):
        return {one["request_id"]: one for one in show(keyed, "requests", **headers)["data"]}

    ids = {name: answer.headers["x-request-id"] for name, answer in answers.items()}
    wait_until(lambda: set(ids.values()) <= set(shown(**A)))
    for name, answer in answers.items():
        entry = shown(**A)[ids[name]]
        assert (entry["state"], entry["status"], entry["receipt"]) == ("refused", 400, None)
        sentence = answer.json()["error"]["message"]
        assert entry["error"] == sentence or (name == "long" and "reads at most" in entry["error"])
        assert f"id={ids[name]}" in entry["log"].split()
        assert shown(**ADMIN)[ids[name]]["key"] == "alice"
        assert shown(**ADMIN)[ids[name]]["error"] == "", "it may quote the prompt"
    others = {nobody.headers["x-request-id"], asked.headers["x-request-id"]}
    assert not others & set(shown(**ADMIN)), "anyone can send these; and it has no prompt"
    assert not set(ids.values()) & set(shown(**B))
    after = show(keyed, "saved", **ADMIN)["points"]
    assert sum(p["refused"] for p in after) - sum(p["refused"] for p in before) == 3
    assert 'keepwarm_answers_total{outcome="failed"} 0.0' in keyed.get("/metrics", **ADMIN).text


def test_a_request_that_fails_in_the_engine_is_booked_once(serving, monkeypatch):
    with serving() as live:
        scheduler = live.host.engine._scheduler
        monkeypatch.setattr(scheduler._intake, "start", lambda *_: 1 / 0)
        answer = live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert answer.status_code == 500
        wait_until(lambda: show(live, "requests")["data"][0]["log"] is not None)
        (entry,) = show(live, "requests")["data"]
        assert (entry["state"], entry["status"]) == ("failed", 500)


# Status.


@pytest.mark.parametrize(
    ("change", "level", "reason"),
    [
        ({}, "green", None),
        ({"tiers": {"disk": TierStats(evicted=5)}}, "green", None),
        ({"tiers": {"disk": TierStats(quarantined=1)}}, "red", "1 damaged record was quarantined"),
        ({"writes": WriteStats(failed=2)}, "red", "2 saves failed"),
        ({"writes": WriteStats(dropped=1)}, "amber", "1 save was dropped"),
        (
            {"writes": WriteStats(disk_full=3, orphans=9)},
            "amber",
            "3 saves were dropped: the store",
        ),
        ({"writes": WriteStats(over_budget=1, orphans=2)}, "amber", "raise disk_writes_per_day"),
        ({"failed_restores": {"damaged": 3}}, "amber", "3 restores failed"),
        (
            {"tiers": {"shared 1": SharedStats(state="open", last_error="gone")}},
            "amber",
            "The tier shared 1 is not used (open): gone",
        ),
        ({"tiers": {"shared 1": SharedStats(state="half-open")}}, "green", None),
        ({"tiers": {"shared 1": SharedStats(errors=3)}}, "green", None),
        ({"tiers": {"disk": TierStats(errors=3)}}, "amber", "3 records could not be read."),
        (
            {"tiers": {"shared 1": SharedStats(quarantined=1)}},
            "amber",
            "1 record of a shared tier was damaged.",
        ),
    ],
)
def test_damage_and_lost_saves_turn_the_status(change, level, reason):
    live, counters = LiveStats(0, 0, 0, 0, 0, 0, 0), Ledger().counters()
    sound = Stats(0, 0, 0, counters, 0.0, 1.0, live, {}, WriteStats(), True, PromptCounts(), {})
    found = condition_out(replace(sound, **change), Viewer("", True, False, True, True, True, {}))
    assert found["level"] == level
    assert [reason in said for said in found["reasons"]] == ([True] if reason else [])


@pytest.mark.parametrize(
    ("amounts", "saved_s"),
    [
        ({}, 0.0),
        ({"saved_ms": 1500}, 1.5),
        ({"unknown_savings": 2}, None),
        ({"unknown_savings": 2, "saved_ms": 1500}, 1.5),
    ],
)
def test_time_saved_that_is_unknown_is_not_told_as_none(amounts, saved_s):
    assert totals_out(amounts)["saved_s"] == saved_s


# Connect, and settings.


def test_every_client_is_told_the_address_and_the_keys_name(keyed):
    told = show(keyed, "connect", **A)
    assert (told["key"], told["model"], told["url"]) == ("alice", "tiny", keyed.url)
    assert {"claude", "codex", "opencode", "qwen", "aider", "any", "curl"} == {
        client["client"] for client in told["clients"]
    }
    for client in told["clients"]:
        lines = "\n".join(client["lines"])
        assert keyed.url in lines, client
        assert "the key alice" in client["lines"][0]
        assert '"$KEEPWARM_API_KEY"' in lines or "Bearer $KEEPWARM_API_KEY" in lines


def test_without_keys_none_is_asked_for(live):
    told = show(live, "connect")
    assert told["key"] is None
    assert all("…" not in line for client in told["clients"] for line in client["lines"])


def test_settings_in_force_without_secrets(keyed):
    data = show(keyed, "settings", **ADMIN)["data"]
    found = {setting["name"]: setting for setting in data}
    assert found["admin_key"]["value"] == "set"
    assert (found["api_keys"]["value"], found["api_keys"]["changed"]) == ("set", True)
    assert (found["port"]["value"], found["port"]["changed"]) == ("8181", False)
    assert not found["downloads"]["changed"]
    assert not {"a", "b", "admin"} & {setting["value"] for setting in data}

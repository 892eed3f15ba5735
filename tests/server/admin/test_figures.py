"""One number everywhere: metrics, cache API, dashboard and command line read the same counts."""

import json

from tests.cli import keepwarm_here
from tests.server.admin.test_metrics import read

ADMIN = {"Authorization": "Bearer admin"}
REUSED = "keepwarm_reused_tokens_total"
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


def ask(live, *messages):
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
    answer = live.post("/v1/chat/completions", {"messages": said, "max_tokens": 2})
    assert answer.status_code == 200
    return answer.json()["keepwarm"]


def by_command(home):
    done = keepwarm_here("cache", "stats", "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_figures_are_the_same_everywhere_and_survive_a_restart(serving, tmp_path):
    """They follow from the receipts of a cold prompt, the same again, a second turn, and one after
    a `clear`, which is no eviction."""
    with serving(home=tmp_path) as live:
        assert live.get("/v1/cache").json()["prompts"]["hit_rate"] is None
        assert ("keepwarm_store_hit_rate",) not in read(live)
        receipts = [ask(live, TEXT), ask(live, TEXT), ask(live, TEXT, "Yes.", "More.")]
        live.host.engine.wait_until_saved()
        assert live.post("/v1/cache/clear", {}).status_code == 200
        receipts.append(ask(live, TEXT))
        live.host.engine.wait_until_saved()
        figures = live.get("/v1/cache").json()["prompts"]
        check_figures(figures, receipts)
        assert by_command(tmp_path)["prompts"] == figures, "of the store, not of its own process"
        check_dashboard(live.get("/v1/dashboard/saved").json(), figures)
        found = read(live)
        check_metrics(found, figures)
        evicted = {found["keepwarm_evictions_total", tier] for tier in ("live", "memory", "disk")}
        assert evicted == {0}
        with serving(home=tmp_path) as other:
            assert other.get("/v1/cache").json()["prompts"] == figures
            own = ask(other, TEXT)
            after = other.get("/v1/cache").json()["prompts"]
            assert after["requests"] == figures["requests"] + 1
            other.host.engine.wait_until_saved()
            assert live.get("/v1/cache").json()["prompts"] == after, "the other process's too"
            check_sums([read(live), read(other)], [*receipts, own])


def check_sums(scraped, receipts):
    """Counters of a process add up over processes; each shows the store's as they are."""
    n_prompt = sum(receipt["prompt_tokens"] for receipt in receipts)
    n_reused = sum(sum(receipt["reused"].values()) for receipt in receipts)
    assert sum(found["keepwarm_prompt_tokens_total",] for found in scraped) == n_prompt
    by_tier = [v for found in scraped for k, v in found.items() if k[0] == REUSED]
    assert sum(by_tier) == n_reused
    assert {found["keepwarm_store_prompt_tokens_total",] for found in scraped} == {n_prompt}


def check_figures(figures, receipts):
    n_prompt = sum(receipt["prompt_tokens"] for receipt in receipts)
    n_reused = sum(sum(receipt["reused"].values()) for receipt in receipts)
    assert [bool(receipt["reused"].get("disk")) for receipt in receipts] == [False] * 3 + [True]
    assert figures["requests"] == 4
    assert figures["prompt_tokens"] == n_prompt
    assert sum(figures["reused"].values()) == n_reused
    assert figures["computed"] == n_prompt - n_reused
    assert figures["hits"] == {"live": 2, "memory": 0, "disk": 1}
    assert figures["misses"] == {"live": 2, "memory": 4, "disk": 3}
    assert figures["hit_rate"] == round(n_reused / n_prompt, 4)
    second = receipts[2]
    share = round(sum(second["reused"].values()) / second["prompt_tokens"], 4)
    assert figures["hit_rate_from_turn_2"] == share != figures["hit_rate"]


def check_dashboard(saved, figures):
    assert saved["total"]["reused"] == figures["reused"]
    assert saved["total"]["computed"] == figures["computed"] == saved["today"]["computed"]
    for name in ("hit_rate", "hit_rate_from_turn_2"):
        assert saved[name] == figures[name]


def check_metrics(found, figures):
    for name in ("hit_rate", "hit_rate_from_turn_2"):
        assert found[f"keepwarm_store_{name}",] == figures[name]
    assert found["keepwarm_store_prompt_tokens_total",] == figures["prompt_tokens"]
    assert found["keepwarm_store_computed_tokens_total",] == figures["computed"]
    for name, metric in (("hits", "hits"), ("misses", "misses"), ("reused", "reused_tokens")):
        by_tier = {tier: found[f"keepwarm_store_{metric}_total", tier] for tier in figures[name]}
        assert by_tier == figures[name]


def test_a_failed_restore_is_exported_with_its_reason(serving):
    with serving(admin_key="admin") as live:
        ask(live, TEXT)
        live.host.engine.wait_until_saved()
        live.post("/v1/cache/clear", {})
        for path in live.settings.store.glob("blocks/*/*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert ask(live, TEXT)["reused"] == {}
        found = read(live, **ADMIN)
        assert found["keepwarm_failed_restores_total", "damaged"] == 1
        assert found["keepwarm_failed_restores_total", "missing"] == 0
        assert live.get("/v1/cache", **ADMIN).json()["failed_restores"]["damaged"] == 1
        health = live.get("/v1/dashboard/saved", **ADMIN).json()["health"]
        assert health["failed_restores"] == 1


def test_verify_says_the_same_by_http_and_by_command(serving, tmp_path):
    """Every bad record and agent by name."""
    with serving(home=tmp_path, admin_key="admin") as live:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
        for agent in ("kept", "torn"):
            header = {"X-Keepwarm-Agent": agent, "X-Keepwarm-Cache": "durable"}
            assert live.post("/v1/chat/completions", body, **header).status_code == 200
        live.host.engine.wait_until_saved()
        (live.settings.store / "agents" / "torn.json").write_text("{")
        newer = json.loads((live.settings.store / "agents" / "kept.json").read_text())
        newer["version"] = 99
        (live.settings.store / "agents" / "kept.json").write_text(json.dumps(newer))
        damaged = sorted(live.settings.store.glob("blocks/*/*.safetensors"))[:2]
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        told = live.post("/v1/cache/verify", {}, **ADMIN).json()
    done = keepwarm_here("cache", "verify", "--json", home=tmp_path)
    by_name = json.loads(done.stdout)
    assert done.returncode == 1
    assert told.pop("object") == "cache.verify"
    for report in (told, by_name):
        report["bad"].sort(key=lambda bad: bad["record"])
    assert told == by_name
    names = {bad["record"] for bad in told["bad"]}
    records = {path.name.removesuffix(".safetensors") for path in damaged}
    assert names == {"agents/torn.json", *records}
    assert told["newer"] == 1
    text = keepwarm_here("cache", "verify", home=tmp_path).stdout.decode()
    assert all(name in text for name in names), "in the text too"

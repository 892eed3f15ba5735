"""Metrics exist, count correctly, and are documented."""

import uuid
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from keepwarm import config
from keepwarm.server.admin import monitoring
from keepwarm.server.app import create_app
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from tests.kit.waiting import wait_until

ENDLESS = {"logit_bias": {"2": -100}}  # the end of a turn
SOON = 60.0
STATES = "ok", "half-open", "open", "refused", "too far", "read-only"
PAGE = Path(__file__).parents[3] / "docs" / "operations.md"


def read(live, **headers):
    """Every sample by name and labels."""
    text = live.get("/metrics", **headers).text
    families = list(text_string_to_metric_families(text))
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def ask(live, text=None):
    text = text or f"{uuid.uuid4()} and the quick brown fox"
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        **ENDLESS,
    }
    answer = live.post("/v1/chat/completions", body)
    assert answer.status_code == 200
    return answer.json()


def test_a_request_is_counted(live):
    text = f"{uuid.uuid4()} the quick brown fox " * 8
    before = read(live)
    cold, *warm = [ask(live, text) for _ in range(3)]
    after = read(live)

    def more(*name):
        return after[name] - before.get(name, 0)

    answers = [cold, *warm]
    usages = [answer["usage"] for answer in answers]
    assert more("keepwarm_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert more("keepwarm_generated_tokens_total") == sum(u["completion_tokens"] for u in usages)
    n_fed = sum(answer["keepwarm"]["recomputed"] for answer in answers)
    assert more("keepwarm_prefilled_tokens_total") == n_fed
    reused = sum(sum(a["keepwarm"]["reused"].values()) for a in answers)
    tiers = {name[1] for name in after if name[0] == "keepwarm_reused_tokens_total"}
    assert sum(more("keepwarm_reused_tokens_total", tier) for tier in tiers) == reused
    assert more("keepwarm_answers_total", "finished") == 3
    assert more("keepwarm_http_requests_total", "chat", "ok") == 3
    counts = [more("keepwarm_time_to_first_token_seconds_count", warm) for warm in ("no", "yes")]
    assert counts == [1, 2]
    assert more("keepwarm_token_seconds_count") == 3
    assert read(live)["keepwarm_token_seconds_count",] == after["keepwarm_token_seconds_count",]


def test_what_the_engine_did_beside_requests_is_counted_in_its_unit(live):
    engine = live.host.engine
    ask(live)
    engine.wait_until_saved()
    before, n_live = read(live), engine.live.stats.entries
    engine.live.release(engine.live.max_bytes)
    engine.ledger.count(saved_ms=2500)
    after = read(live)
    assert (
        after["keepwarm_evictions_total", "live"] - before["keepwarm_evictions_total", "live"]
        == n_live
        > 0
    )
    assert after["keepwarm_saved_seconds_total",] - before[
        "keepwarm_saved_seconds_total",
    ] == pytest.approx(2.5)
    writes = engine.stats().writes
    assert writes.queued_bytes == 0
    assert after["keepwarm_written_bytes_total",] == writes.written_bytes > 0


def test_routers_find_what_they_read_of_vllm(live):
    ask(live)
    found = read(live)
    reused = sum(
        value for name, value in found.items() if name[0] == "keepwarm_reused_tokens_total"
    )
    same = {
        "vllm:prefix_cache_queries_total": found["keepwarm_prompt_tokens_total",],
        "vllm:prefix_cache_hits_total": reused,
        "vllm:generation_tokens_total": found["keepwarm_generated_tokens_total",],
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
    }
    assert {name: found[name,] for name in same} == same
    manual = PAGE.read_text()
    assert [name for name, _ in monitoring.VLLM_NAMES if name not in manual] == []


def test_no_answer_is_lost_between_two_readings(serving):
    """More answers than the journal holds; each is counted once."""
    with serving() as live:
        ask(live)
        ledger = live.host.engine.ledger
        (record,) = ledger.records()
        for _ in range(600):
            ledger.append(record)
        found, n_journal = read(live), len(ledger.records())
    times = "keepwarm_time_to_first_token_seconds_count"
    assert sum(found.get((times, warm), 0) for warm in ("no", "yes")) == 601 > n_journal
    assert found["keepwarm_token_seconds_count",] == 601


def test_a_cancelled_answer_has_no_latency(live):
    before = read(live)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8000, "stream": True}
    options = {"json": body | ENDLESS, "timeout": 300}
    with httpx.stream("POST", f"{live.url}/v1/chat/completions", **options) as answer:
        next(answer.iter_lines())
    wait_until(lambda: read(live)["keepwarm_answers_total", "cancelled"] > cancelled(before))
    name = ("keepwarm_token_seconds_count",)
    assert read(live)[name] == before[name]


def cancelled(found):
    return found["keepwarm_answers_total", "cancelled"]


def test_what_is_refused_is_counted_by_its_own_server(serving):
    with serving(api_keys="a") as live:
        key = {"Authorization": "Bearer a"}
        live.post("/v1/messages", {})
        live.post("/v1/messages", {}, **key)
        live.get("/nowhere/at/all", **key)
        found = read(live, **key)
        assert found["keepwarm_http_requests_total", "messages", "refused"] == 2
        assert found["keepwarm_http_requests_total", "other", "refused"] == 1
        assert ("keepwarm_http_requests_total", "chat", "ok") not in found


def test_every_tier_has_its_bytes(live):
    ask(live)
    found = read(live)
    for tier in ("live", "memory", "disk"):
        assert found["keepwarm_kept_bytes", tier] <= found["keepwarm_kept_bytes_limit", tier]
    assert found["keepwarm_kept_bytes", "live"] > 0
    assert found["keepwarm_ready",] == 1
    assert found["process_resident_memory_bytes",] > 0


def test_a_shared_tier_that_is_gone_is_shown(serving, tmp_path):
    """In metrics, in what `GET /v1/cache` says, and as the dashboard's condition."""
    missing = (tmp_path / "missing").as_uri()
    with serving(remote=missing) as live:
        (tier,) = live.host.engine.store._lookups.shared
        tier.health.wait_until_tried(SOON)
        found = read(live)
        states = [found["keepwarm_shared_tier_state", *sorted(("shared 1", s))] for s in STATES]
        assert states == [0, 0, 1, 0, 0, 0]
        told = live.get("/v1/cache").json()["tiers"]["shared 1"]
        assert (told["state"], told["last_error"]) == ("open", "No such file or directory")
        (reason,) = live.get("/v1/dashboard/now").json()["condition"]["reasons"]
        assert reason == "The tier shared 1 is not used (open): No such file or directory"
        tier._counts.add(errors=2, quarantined=1)
        bad = read(live)["keepwarm_restore_failures_total", "shared 1"]
        assert bad == 1, "calls that fail are no records that are bad"


@pytest.mark.parametrize(
    ("keys", "key", "is_told"),
    [
        ({"api_keys": "a,b", "share_cache": True}, "a", False),
        ({"api_keys": "a", "admin_key": "c", "share_cache": True}, "a", False),
        ({"api_keys": "a", "admin_key": "c", "share_cache": True}, "c", True),
        ({"api_keys": "a"}, "a", True),
    ],
)
def test_where_a_shared_tier_is_is_for_the_operator(serving, tmp_path, keys, key, is_told):
    """Its state is for all who see totals; an error of it may have an address in it."""
    with serving(remote=(tmp_path / "missing").as_uri(), **keys) as live:
        (tier,) = live.host.engine.store._lookups.shared
        tier.health.wait_until_tried(SOON)
        you = {"Authorization": f"Bearer {key}"}
        told = live.get("/v1/cache", **you).json()["tiers"]["shared 1"]
        assert (told["state"], "last_error" in told) == ("open", is_told)
        (reason,) = live.get("/v1/dashboard/now", **you).json()["condition"]["reasons"]
        assert reason.startswith("The tier shared 1 is not used (open)")
        assert ("No such file" in reason) == is_told
        settings = live.get("/v1/dashboard/settings", **you).json()["data"]
        remote = next(row["value"] for row in settings if row["name"] == "remote")
        assert remote == (live.settings.remote if is_told else "set")


def test_openmetrics_is_spoken_too(live):
    answer = live.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert "openmetrics-text" in answer.headers["content-type"]
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/responses/resp_1", "responses"),
        ("/v1/messages", "messages"),
        ("/v1/messagesque", "other"),
        ("/mcp", "mcp"),
        ("/v1/dashboard/requests/7/cancel", "dashboard"),
        ("/health/live", "health"),
        ("/", "page"),
        ("/v1", "other"),
        ("/nowhere", "other"),
    ],
)
def test_paths_have_few_names(path, api):
    assert monitoring._api(path) == api


def test_every_route_has_a_name():
    """Requests of the server's own pages are not counted as `other`."""
    settings = config.load({})
    app = create_app(Models(EngineHost(None, "none"), settings), settings)
    schema = TestClient(app, base_url="http://127.0.0.1").get("/openapi.json").json()
    paths = {*schema["paths"], "/", "/dashboard/main.js", "/docs", "/openapi.json"}
    assert "/v1/dashboard/now" in paths
    assert {path for path in paths if monitoring._api(path) == "other"} == set()

"""The cache API: lookup, warm, clear, verify."""

import uuid
from contextlib import suppress

import pytest

from keepwarm.prefix.blocks import pack
from keepwarm.text.request import Request

A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
ADMIN = {"Authorization": "Bearer admin"}


def prompt():
    """A prompt that was not sent before."""
    text = f"{uuid.uuid4()} The quick brown fox jumps over the lazy dog. " * 8
    return [{"role": "user", "content": text}]


def ask(live, messages, **headers):
    body = {"messages": messages, "max_tokens": 2}
    answer = live.post("/v1/chat/completions", body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


BODIES = {
    "": lambda messages: {"messages": messages},
    "/messages": lambda messages: {"messages": messages},
    "/responses": lambda messages: {"input": messages},
}
every_api = pytest.mark.parametrize("api", BODIES)


def lookup(live, messages, api="", **headers):
    answer = live.post(f"/v1/cache/lookup{api}", BODIES[api](messages), **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


@every_api
def test_prompt_is_looked_up_and_warmed_before_it_is_asked(live, api):
    """Lookup agrees with the receipt of the answer, and changes nothing."""
    messages = prompt()
    cold = lookup(live, messages, api)
    assert sum(cold["warm"].values()) < 32  # what all templates begin with
    made = live.post(f"/v1/cache/warm{api}", BODIES[api](messages))
    assert made.status_code == 200, made.text
    assert made.json()["keepwarm"]["recomputed"] > 0
    warm = lookup(live, messages, api)
    assert sum(warm["warm"].values()) == warm["prompt_tokens"] - 1
    assert lookup(live, messages, api) == warm
    receipt = ask(live, messages)["keepwarm"]
    assert receipt["prompt_tokens"] == warm["prompt_tokens"] == cold["prompt_tokens"]
    assert receipt["recomputed"] <= 2
    later, other = lookup(live, messages, api), lookup(live, prompt(), api)  # by the same rates
    assert later["warm"].keys() == {"live"}
    assert later["ttft_ms"] < other["ttft_ms"]


def test_body_says_how_a_prompt_is_warmed_and_looked_up(live):
    """Other KV options are another namespace; what nothing may keep is not warm."""
    line = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=0f1e2;"
    system = {"role": "system", "content": f"{line}\nBe brief."}
    for options, is_kept in (
        ({"kv": {"max_kv_size": 4096}, "agent": "warmed"}, True),
        ({"cache": "no-store", "agent": "warmed"}, False),
    ):
        body = {"messages": [system, *prompt()]}
        assert live.post("/v1/cache/warm", body | {"keepwarm": options}).is_success
        assert live.host.engine.requests()[-1].agent == "warmed"
        usual = live.post("/v1/cache/lookup", body).json()
        assert sum(usual["warm"].values()) < 32
        found = live.post("/v1/cache/lookup", body | {"keepwarm": options}).json()
        assert (sum(found["warm"].values()) == found["prompt_tokens"] - 1) is is_kept
        assert found["scrubbed"] == ["billing-header"]
    wrong = live.post("/v1/cache/warm", body | {"keepwarm": {"agent": "?"}})
    assert wrong.json()["error"]["param"] == "keepwarm.agent"


def test_a_text_completion_is_looked_up_and_warmed(live):
    text = prompt()[0]["content"]
    cold = live.post("/v1/cache/lookup/completions", {"prompt": text}).json()
    assert sum(cold["warm"].values()) < 32
    assert live.post("/v1/cache/warm/completions", {"prompt": [text]}).status_code == 200
    warm = live.post("/v1/cache/lookup/completions", {"prompt": text}).json()
    assert sum(warm["warm"].values()) == warm["prompt_tokens"] - 1
    several = live.post("/v1/cache/lookup/completions", {"prompt": [text, text]})
    assert several.status_code == 400
    assert several.json()["error"]["param"] == "prompt"


def test_stats_say_what_is_kept(live):
    before = live.get("/v1/cache").json()
    messages = prompt()
    n_tokens = ask(live, messages)["usage"]["prompt_tokens"]
    ask(live, messages)
    after = live.get("/v1/cache").json()
    counts = [tier[name] for tier in after["tiers"].values() for name in ("blocks", "evicted")]
    assert {type(count) for count in counts} == {int}
    assert after["model"] == "tiny"
    assert set(after["tiers"]) == {"memory", "disk"}
    assert after["live"]["n_bytes"] > 0

    def reused(stats):
        return sum(stats["counters"]["reused_tokens"].values())

    assert reused(after) - reused(before) >= n_tokens - 1
    assert sum(after["requests"].values()) == 0


def test_clearing_memory_leaves_the_disk(serving):
    with serving() as live:
        messages = prompt()
        ask(live, messages, **{"X-Keepwarm-Cache": "durable"})
        assert lookup(live, messages)["warm"]["live"] > 0
        cleared = live.post("/v1/cache/clear", {}).json()
        assert cleared["removed_blocks"] == 0
        found = lookup(live, messages)
        assert found["warm"].get("live", 0) == 0
        assert sum(found["warm"].values()) == found["prompt_tokens"] - 1


def files_with(live, messages):
    """Files of the store that contain token ids of a prompt."""
    engine = live.host.engine
    words = pack(engine.prepare(Request(messages=messages)).tokens[8:40])
    root = engine.store.on_disk.disk.root
    while True:
        paths = [path for path in root.rglob("*") if path.is_file()]
        with suppress(FileNotFoundError):  # one was renamed meanwhile: look again
            return [path for path in paths if words in path.read_bytes()]


def test_clearing_the_disk_is_for_the_admin(serving):
    with serving(admin_key="admin") as live:
        messages = prompt()
        ask(live, messages, **{"X-Keepwarm-Cache": "durable", "X-Keepwarm-Agent": "someone"})
        ask(live, messages, **{"X-Keepwarm-Cache": "durable"})
        assert files_with(live, messages)
        refused = live.post("/v1/cache/clear", {"disk": True})
        assert refused.status_code == 403
        assert "admin key" in refused.json()["error"]["message"]
        assert live.get("/v1/cache").json()["tiers"]["disk"]["blocks"] > 0
        cleared = live.post("/v1/cache/clear", {"disk": True}, **ADMIN).json()
        assert cleared["removed_blocks"] > 0
        assert cleared["removed_agents"] == 1
        assert live.get("/v1/cache").json()["tiers"]["disk"]["blocks"] == 0
        assert sum(lookup(live, messages)["warm"].values()) == 0
        assert not files_with(live, messages)
        assert ask(live, messages)["keepwarm"]["reused"] == {}


def test_verify_finds_what_is_damaged(serving):
    """The server can check its records."""
    with serving(admin_key="admin") as live:
        ask(live, prompt(), **{"X-Keepwarm-Cache": "durable"})
        assert live.post("/v1/cache/verify", {}).status_code == 403
        good = live.post("/v1/cache/verify", {}, **ADMIN).json()
        assert good["records"] > 0
        assert good["bad"] == []
        record = next(live.settings.store.glob("blocks/*/*.safetensors"))
        data = bytearray(record.read_bytes())
        data[-1] ^= 1
        record.chmod(0o600)
        record.write_bytes(data)
        (bad,) = live.post("/v1/cache/verify", {"fix": True}, **ADMIN).json()["bad"]
        assert bad["record"] in record.name
        assert bad["quarantined"] is True
        assert live.post("/v1/cache/verify", {}, **ADMIN).json()["bad"] == []


def test_key_cannot_clear_or_look_up_what_others_have(serving):
    with serving(api_keys="a,b", admin_key="admin") as live:
        messages = prompt()
        ask(live, messages, **A)
        assert sum(lookup(live, messages, **A)["warm"].values()) > 0
        assert sum(lookup(live, messages, **B)["warm"].values()) == 0
        assert live.post("/v1/cache/clear", {}, **A).status_code == 403
        assert live.post("/v1/cache/clear", {}, **ADMIN).status_code == 200

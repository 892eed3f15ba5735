"""`cache_control` and `prompt_cache_key` over HTTP: a pin with a TTL, and an agent's name."""

import time
import uuid

import httpx

from keepwarm.agents.shares import TtlPins
from keepwarm.store.disk.disk import INDEX_ROOM
from tests.kit.waiting import wait_until

DURABLE = {"X-Keepwarm-Cache": "durable"}


def words(n=10):
    """A new prompt of some hundred tokens."""
    return f"{uuid.uuid4()} The quick brown fox jumps over the lazy dog. " * n


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}


def marked_message():
    system = {"type": "text", "text": words(), "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": "Hello"}]
    return {"system": [system], "messages": messages, "max_tokens": 2}


def asked(live, path, body):
    answer = live.post(path, body, **DURABLE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def warm(live, body, api=""):
    """How much of a prompt lies where."""
    found = live.post(f"/v1/cache/lookup{api}", body).json()
    return found["prompt_tokens"], found["warm"]


def on_disk(live, body, api=""):
    """How much of a prompt is left when memory is lost, as a share."""
    live.post("/v1/cache/clear", {})
    n_tokens, found = warm(live, body, api)
    return sum(found.values()) / n_tokens


def press(live, n_prompts=8):
    for _ in range(n_prompts):
        asked(live, "/v1/chat/completions", chat(words()))


def test_a_breakpoint_is_kept_until_its_end(serving):
    """Later prompts take the room of what was asked beside it, and its own once its time is up."""
    marked, plain = marked_message(), chat(words())
    with serving(disk_bytes=INDEX_ROOM + (2 << 20)) as live:
        asked(live, "/v1/messages", marked)
        asked(live, "/v1/chat/completions", plain)
        assert on_disk(live, plain) > 0.9
        press(live)
        assert on_disk(live, plain) < 0.9
        assert on_disk(live, marked, "/messages") > 0.9
        later = TtlPins(live.host.engine.store.on_disk.disk, clock=lambda: time.time() + 301)
        assert later.expire() == 1
        press(live)
        assert on_disk(live, marked, "/messages") < 0.9


def test_a_breakpoint_of_a_prompt_that_is_only_warmed(serving):
    with serving() as live:
        asked(live, "/v1/cache/warm/messages", marked_message())
        disk = live.host.engine.store.on_disk.disk
        wait_until(lambda: [block.pinned for block in disk.walk()].count(True) == 1)


def test_a_prompt_cache_key_names_what_is_warmed_at_the_next_start(serving, tmp_path):
    """Its blocks are that agent's: read into memory before anybody asks, gone when it goes."""
    named, nameless = chat(words(), prompt_cache_key="ops"), chat(words())
    with serving(home=tmp_path) as live:
        for body in (named, nameless):
            asked(live, "/v1/chat/completions", body)
    with serving(home=tmp_path) as live:
        n_tokens = warm(live, named)[0]
        wait_until(lambda: warm(live, named)[1].get("live", 0) == n_tokens - 1)
        assert warm(live, nameless)[1].get("live", 0) < 32
        agent = live.get("/v1/agents/ops").json()
        assert agent["n_tokens"] >= n_tokens
        assert agent["n_bytes"] > 0
        assert httpx.delete(f"{live.url}/v1/agents/ops").is_success
        assert on_disk(live, named) < 0.9
        assert on_disk(live, nameless) > 0.9

"""What a key is told, and what it may hold, over HTTP."""

import asyncio
import logging
import time

import httpx
import pytest

from keepwarm import config
from keepwarm.agents.texts import PAGE, AgentTexts
from keepwarm.models.load import load
from keepwarm.server.http.logs import LINE, RecentLines, RedactingFormatter, RequestLog
from keepwarm.store.disk.disk import DiskTier
from keepwarm.telemetry.ledger import Ledger
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import serve

CHAT = "/v1/chat/completions"
TALK = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 4}
KEY, ADMIN = ({"Authorization": f"Bearer {name}"} for name in ("stranger", "boss"))
SELF = {"$ref": "#"}
ENDLESS = {"type": "object", "properties": {"a": SELF}, "required": ["a"]}
SCHEMAS = [
    SELF,
    {"allOf": [SELF]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("model"))
    home = str(tmp_path_factory.mktemp("home"))
    keys = {"api_keys": "stranger,other", "admin_key": "boss"}
    settings = config.load({"KEEPWARM_HOME": home}, model_ttl_s=60.0, **keys)
    with serve(load(str(path), settings), settings) as server:
        yield server


def test_control_characters_of_another_servers_error_stay_in_their_line():
    said = "-ERR \x1b[2J\r\n2026-01-01 00:00:00 INFO keepwarm: all is well\x85\u2028\x00"
    record = logging.LogRecord("keepwarm", 30, "", 1, "Redis said %s", (said,), None)
    line = RedactingFormatter(LINE).format(record)
    assert line.isprintable()
    assert r"-ERR \x1b[2J\r\n2026-01-01" in line


def test_every_answer_forbids_to_guess_its_type(live):
    asked = [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/nowhere"), ("POST", CHAT)]
    for method, path in asked:
        body = TALK if method == "POST" else None
        answer = httpx.request(method, live.url + path, json=body, headers=KEY, timeout=60)
        assert answer.headers["x-content-type-options"] == "nosniff", path
    assert live.get("/v1/models").headers["x-content-type-options"] == "nosniff"  # a 401


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_schema_that_is_only_itself_is_refused(live, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for path, body in ((CHAT, {"response_format": wanted}), ("/api/chat", {"format": schema})):
        answer = live.post(path, {"model": "tiny", **TALK, **body}, **KEY)
        assert answer.status_code == 400, answer.text
        assert "format cannot be compiled" in answer.text


def test_a_schema_that_nothing_fits_is_the_requests_fault(live):
    tool = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}
    body = {**TALK, "max_tokens": 64, "tools": [tool], "tool_choice": "required"}
    answer = live.post(CHAT, body, **KEY)
    assert answer.status_code == 400, answer.text
    assert "cannot follow its format any further" in answer.text
    assert live.post(CHAT, TALK, **KEY).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/agents/nobody/chat/completions", TALK),
        ("/v1/agents/nobody/v1/messages", TALK),
        ("/v1/agents/nobody/compact", {}),
        ("/v1/agents/nobody/fork", {"id": "other"}),
        (CHAT, {**TALK, "keepwarm": {"agent": "nobody", "continue": True}}),
    ],
)
def test_a_missing_agent_is_named_as_its_key_does_and_without_advice_for_operators(
    live, path, body
):
    answer = live.post(path, body, **KEY)
    assert answer.status_code == 404, answer.text
    assert "There is no agent 'nobody'; list the agents to see their ids." in answer.text


def test_a_key_cannot_keep_a_model_loaded_for_ever(live):
    slots, slot = live.models.slots, live.models.default
    for keep_alive, most in ((-1, 3600), ("1000h", 3600), ("5m", 300)):
        slot.keep_until = 0.0
        body = {"model": "tiny", **TALK, "stream": False, "keep_alive": keep_alive}
        assert live.post("/api/chat", body, **KEY).status_code == 200
        assert slots.kept_until(slot) - slot.used == pytest.approx(most, abs=120)
    assert live.post("/api/chat", {**body, "keep_alive": -1}, **ADMIN).status_code == 200
    assert slots.kept_until(slot) - slot.used > 1e9
    slot.keep_until = 0.0


DAY_S = 86400.0


class Panic(BaseException):
    """As native code raises it."""


def test_a_panic_of_native_code_is_an_error_in_the_apis_form():
    async def panicking(scope, receive, send):
        raise Panic

    async def ask(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.post(path) for path in (CHAT, "/v1/messages", "/api/chat")]

    app = RequestLog(panicking, RecentLines(), lambda *_: None, Ledger())
    openai, anthropic, ollama = asyncio.run(ask(app))
    assert {each.status_code for each in (openai, anthropic, ollama)} == {500}
    assert openai.json()["error"]["type"] == "server_error"
    assert anthropic.json()["error"]["type"] == "api_error"
    assert "other requests" in ollama.json()["error"].lower()


def test_small_stored_responses_reach_a_plateau_and_few_of_them_look_at_all(tmp_path):
    """Each takes a page; all files are looked at some times, not for every response."""
    disk = DiskTier(tmp_path)
    n_most = 128
    texts, now = AgentTexts(disk, n_most * PAGE, time.time), []
    sweep = texts._expire
    texts._expire = lambda ttl_s: now.append(sweep(ttl_s))
    for number in range(3 * n_most):
        texts.put("", f"resp_{number}", b"x" * 10, DAY_S)
    n_files = len(list((tmp_path / "responses").iterdir()))
    assert n_most - 3 <= n_files <= n_most + 3
    assert len(now) <= n_most + 1
    assert texts.get(f"resp_{3 * n_most - 1}", DAY_S)
    disk.close()

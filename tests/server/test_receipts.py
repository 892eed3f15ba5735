"""If requested, the receipt says why tokens were computed: in every API, streamed or not."""

import json
import uuid

import pytest

EXPLAIN = {"keepwarm": {"explain": True}}
BODIES = {
    "/v1/chat/completions": lambda text: {"messages": said(text), "max_tokens": 2},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
    "/v1/messages": lambda text: {"messages": said(text), "max_tokens": 2},
}
every_api = pytest.mark.parametrize("path", BODIES)
both_ways = pytest.mark.parametrize("stream", [False, True])


def said(text):
    return [{"role": "user", "content": text}]


def words():
    """A new prompt."""
    return f"{uuid.uuid4()} is the question, and what is the answer to it?"


def receipt_of(live, path, body):
    answer = live.post(path, body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return answer.json()["keepwarm"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    receipts = [event.get("response", event).get("keepwarm") for event in events]
    return [receipt for receipt in receipts if receipt][-1]


@every_api
@both_ways
def test_why_it_missed(live, path, stream):
    body = BODIES[path](words()) | {"stream": stream}
    receipt = receipt_of(live, path, body | EXPLAIN)
    assert receipt["miss"]["reason"] in {"new", "diverged"}
    assert receipt["miss"]["position"] == receipt["prompt_tokens"] - receipt["recomputed"]
    assert "miss" not in receipt_of(live, path, BODIES[path](words()) | {"stream": stream})


@both_ways
def test_of_several_prompts_the_dearest_is_explained(live, stream):
    known, new = words(), words()
    live.post("/v1/completions", BODIES["/v1/completions"](known))
    body = {"prompt": [known, new], "max_tokens": 2, "stream": stream}
    receipt = receipt_of(live, "/v1/completions", body | EXPLAIN)
    assert receipt["miss"]["reason"] in {"new", "diverged"}
    assert receipt["miss"]["position"] < 8, "of the one that was known nearly all is"


SYSTEM = [
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "The user likes tea.\n<env>\n  Working directory: /a\n</env>"},
]
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}


def test_what_is_moved_is_named(live):
    """Known blocks, and what is behind a `cache_control` mark; nothing where no tool is offered."""
    body = {"messages": said("Where?"), "system": SYSTEM, "max_tokens": 2, "stream": False}
    receipt = receipt_of(live, "/v1/messages", body | {"tools": [TOOL]})
    assert receipt["reordered"] == ["tools", "environment", "uncached"]
    assert "reordered" not in receipt_of(live, "/v1/messages", body)

"""A call that the model repeats is told in the receipt; whether to go on is the client's."""

import json

import pytest

from keepwarm import config
from keepwarm.models.load import load
from tests.kit.scripted import call, write_scripted
from tests.server.conftest import serve

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
SAME = call("look", at="the fox")
USER = {"role": "user", "content": "Where is it?"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    home = tmp_path_factory.mktemp("scripted")
    answers = [SAME, SAME, call("look", at="the dog"), SAME]
    settings = config.load({"KEEPWARM_HOME": str(home)})
    with serve(load(str(write_scripted(home / "model", answers)), settings), settings) as live:
        yield live


def answered(live, messages, *, stream=False):
    """The message and the receipt of the next answer."""
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 40, "stream": stream}
    answer = live.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()["choices"][0]["message"], answer.json()["keepwarm"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "data: {" in line]
    return None, json.loads(lines[-1])["keepwarm"]


def after(messages, message, *more):
    """The conversation with a call and its result."""
    results = [
        {"role": "tool", "tool_call_id": made["id"], "content": "nothing"}
        for made in message["tool_calls"]
    ]
    return [*messages, message, *results, *more]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_was_just_made_is_told(scripted, stream):
    """Only in a row, with the same arguments, and since the user last spoke."""
    first, receipt = answered(scripted, [USER])
    assert "repeated_calls" not in receipt
    second, receipt = answered(scripted, after([USER], first))
    assert receipt["repeated_calls"] == [made["id"] for made in second["tool_calls"]]
    _, receipt = answered(scripted, after([USER], first), stream=stream)
    assert len(receipt["repeated_calls"]) == 1
    third_turn = after(after([USER], first), second)
    third, receipt = answered(scripted, third_turn)
    assert "repeated_calls" not in receipt, "other arguments"
    _, receipt = answered(scripted, after(third_turn, third))
    assert "repeated_calls" not in receipt, "not in a row"


def test_after_a_new_question_it_is_no_repetition(scripted):
    first, _ = answered(scripted, [USER])
    _, receipt = answered(scripted, after([USER], first, USER))
    assert "repeated_calls" not in receipt

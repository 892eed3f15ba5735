"""Replays the structure of coding agents' requests; see `shapes/README.md`."""

import json
import random
import re
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from keepwarm.cli.launch import launch

SHAPES = Path(__file__).parent / "shapes"
PAGE = Path(__file__).parent.parent.parent / "docs" / "clients.md"
FETCHED = {"url": "http://127.0.0.1/", "prompt": "What is there?"}
COUNTER = "<total_tokens>{} tokens left</total_tokens>"


def shape_of(name):
    return json.loads((SHAPES / f"{name}.json").read_text())


class Player:
    """Sends the turns of a shape one after the other, with the answers that really came."""

    def __init__(self, shape, url, come_back, *, is_noisy=False):
        self.shape = shape
        self.url = url
        self.is_noisy = is_noisy  # a counter, and tools in another order each time
        self.come_back = come_back  # an answer's events → what the client makes of them
        self.session = str(uuid4())
        self.answers = []
        self.calls = []  # ids

    def send(self, turn):
        body = self.filled({**self.shape["body"], **self.shape["turns"][turn]}, turn)
        (name,) = body.keys() & {"messages", "input"}
        body[name] = [each for item in body[name] for each in self.with_answers(item)]
        if self.is_noisy:
            body[name].append({"role": "system", "content": COUNTER.format(90_000 // (turn + 1))})
            body["tools"] = shuffled(body.get("tools", []), random.Random(turn))
        headers = self.filled(self.shape["headers"], turn)
        response = httpx.post(
            self.url + self.shape["path"], json=body, headers=headers, timeout=300
        )
        assert response.status_code == 200, response.text
        answer, calls = self.come_back(events_of(response.text))
        self.answers.append(answer)
        self.calls.append(calls[0] if calls else "")

    def filled(self, value, turn):
        text = (
            json.dumps(value).replace("$SESSION", self.session).replace("$CHANGING", f"{turn:03x}")
        )
        for index, call in enumerate(self.calls):
            text = text.replace(f"$CALL{index}", call)
        return json.loads(text)

    def with_answers(self, item):
        return self.answers[int(item.removeprefix("$ANSWER"))] if isinstance(item, str) else [item]


def shuffled(tools, order):
    """The same tools, which and all their keys are in another order."""
    return order.sample([with_other_keys(tool, order) for tool in tools], len(tools))


def with_other_keys(value, order):
    if not isinstance(value, dict):
        return value
    keys = order.sample([*value], len(value))
    return {key: with_other_keys(value[key], order) for key in keys}


def events_of(text):
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def of_claude_code(events):
    """Blocks as they were streamed, in one message."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "written": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["written"] += delta.get("text") or delta.get("partial_json") or ""
    assert events[-1]["type"] == "message_stop"
    content = [claude_block(block) for block in blocks]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    return [{"role": "assistant", "content": content}], calls


def claude_block(block):
    written = block.pop("written")
    if block["type"] == "tool_use":
        return {**block, "input": json.loads(written)}
    return {**block, "text": written}


def of_codex(events):
    """The items of the finished answer."""
    assert events[-1]["type"] == "response.completed"
    items = events[-1]["response"]["output"]
    return items, [item["call_id"] for item in items if item["type"] == "function_call"]


def of_opencode(events):
    """One message; arguments are serialised again, without spaces."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    message = {"role": "assistant", "content": "".join(d.get("content") or "" for d in deltas)}
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    if parts:
        arguments = json.loads("".join(part["function"].get("arguments", "") for part in parts))
        compact = json.dumps(arguments, separators=(",", ":"))
        function = {"name": parts[0]["function"]["name"], "arguments": compact}
        message["tool_calls"] = [{"id": parts[0]["id"], "type": "function", "function": function}]
    return [message], [call["id"] for call in message.get("tool_calls", ())]


CLIENTS = {"claude-code": of_claude_code, "codex": of_codex, "opencode": of_opencode}


@pytest.mark.parametrize("name", CLIENTS)
def test_from_the_second_request_on_only_what_is_new_is_computed(watch, name):
    """Through all three APIs, as streams, with a tool call, a second question and noise.

    Between the turns a title is asked for under the same id, as opencode does itself: that is
    beside the conversation, which stays the agent's head.
    """
    shape = shape_of(name)
    watched = watch(shape["calls"])
    player = Player(shape, watched.url, CLIENTS[name], is_noisy=True)
    for turn in range(len(shape["turns"])):
        player.send(turn)
        title = {"messages": [{"role": "user", "content": f"A title for turn {turn}, please."}]}
        watched.live.post("/v1/chat/completions", title, **{"x-keepwarm-agent": player.session})
    turns = watched.turns()
    watched.host.engine.wait_until_saved()
    agent = watched.live.get(f"/v1/agents/{player.session}").json()
    assert len(list(filter(None, player.calls))) == len(shape["calls"])
    assert all(turn.is_warm for turn in turns[1:])
    assert all(turn.n_new < turn.asked.n_tokens / 4 for turn in turns[1:])
    assert {turn.asked.request.agent for turn in turns} == {player.session}
    scrubbed = {"total-tokens", *shape["scrubbed"]}
    assert all({*turn.receipt.scrubbed} == scrubbed for turn in turns)
    assert not any("total_tokens" in turn.asked.text for turn in turns)
    assert len(agent["turns"]) == len(turns)
    assert agent["n_tokens"] > turns[-1].asked.n_tokens
    assert all(branch["n_tokens"] < 100 for branch in agent["branches"][1:])
    assert len(agent["branches"][1:]) == 2 * len(shape["turns"]) - len(turns)


def test_tool_that_is_found_later_can_be_called(watch):
    """Claude Code's search adds a tool; the model may call it, and nothing is prefilled again."""
    shape = shape_of("claude-code")
    watched = watch({**shape["calls"], "WebFetch": FETCHED})
    player = Player(shape, watched.url, of_claude_code)
    for turn in range(3):
        player.send(turn)
    (block,) = player.answers[2][0]["content"]
    assert (block["name"], block["input"]) == ("WebFetch", FETCHED)
    before, after = (watched.host.asked[turn].text for turn in (1, 2))
    assert '"name": "WebFetch"' not in before
    assert '"name": "WebFetch"' in after
    assert "Placeholder" not in after


def test_without_scrubbing_the_beginning_changes(watch):
    """The control: the changing line is there, and would cost."""
    shape = shape_of("claude-code")
    shape["headers"]["x-keepwarm-scrub"] = "none"
    watched = watch(shape["calls"])
    player = Player(shape, watched.url, of_claude_code)
    for turn in range(2):
        player.send(turn)
    with pytest.raises(AssertionError, match="the beginning of the prompt has changed"):
        watched.turns()


def test_client_may_look_first_whether_there_is_a_server(shared):
    """Older versions of Claude Code ask for the head of the address itself."""
    assert httpx.head(shared.url, follow_redirects=True, timeout=300).status_code == 200


@pytest.mark.parametrize("client", ["claude", "codex", "opencode", "qwen", "aider", "any"])
def test_docs_page_shows_what_launch_prints(shared, client, capsys, monkeypatch):
    monkeypatch.setenv("KEEPWARM_HOME", str(shared.live.settings.home))
    launch(client, url=shared.url, only_print=True)
    shown = capsys.readouterr().out.replace(shared.url, "http://127.0.0.1:8181")
    assert re.sub(r"\btiny\b", "org/model", shown) in PAGE.read_text()

"""Replays the structure of coding agents' requests; see `shapes/README.md`."""

import json
import re
from pathlib import Path

import httpx
import pytest

from keepwarm.cli.launch import launch

SHAPES = Path(__file__).parent / "shapes"
PAGE = Path(__file__).parent.parent.parent / "docs" / "clients.md"
SESSION = "01a1de6b-71e5-7bf2-bc81-4ebd1856929b"


@pytest.fixture(scope="module")
def idle(watching):
    """A server of which no answer is wanted."""
    with watching({}) as watched:
        yield watched


def shape_of(name):
    return json.loads((SHAPES / f"{name}.json").read_text())


class Player:
    """Sends the turns of a shape one after the other, with the answers that really came."""

    def __init__(self, shape, url, come_back):
        self.shape = shape
        self.url = url
        self.come_back = come_back  # an answer's events → what the client makes of them
        self.answers = []
        self.calls = []  # ids

    def play(self):
        for turn in range(len(self.shape["turns"])):
            self.send(turn)

    def send(self, turn):
        body = self.filled({**self.shape["body"], **self.shape["turns"][turn]}, turn)
        for name in ("messages", "input"):
            if name in body:
                body[name] = [each for item in body[name] for each in self.with_answers(item)]
        headers = self.filled(self.shape["headers"], turn)
        response = httpx.post(
            self.url + self.shape["path"], json=body, headers=headers, timeout=300
        )
        assert response.status_code == 200, response.text
        answer, calls = self.come_back(events_of(response.text))
        self.answers.append(answer)
        self.calls.append(calls[0] if calls else "")

    def filled(self, value, turn):
        text = json.dumps(value).replace("$SESSION", SESSION).replace("$CHANGING", f"{turn:03x}")
        for index, call in enumerate(self.calls):
            text = text.replace(f"$CALL{index}", call)
        return json.loads(text)

    def with_answers(self, item):
        return self.answers[int(item.removeprefix("$ANSWER"))] if isinstance(item, str) else [item]


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
def test_from_the_second_request_on_only_what_is_new_is_computed(watching, name):
    """Through all three APIs, as streams, with a tool call and a second question."""
    shape = shape_of(name)
    with watching(shape["calls"]) as watched:
        player = Player(shape, watched.url, CLIENTS[name])
        player.play()
        turns = watched.turns()
    assert len(list(filter(None, player.calls))) == len(shape["calls"])
    assert all(turn.is_warm for turn in turns[1:])
    assert all(turn.n_new < turn.asked.n_tokens / 4 for turn in turns[1:])
    assert {turn.asked.request.agent for turn in turns} == {SESSION}
    assert {turn.receipt.scrubbed for turn in turns} == {tuple(shape["scrubbed"])}


@pytest.mark.parametrize(
    "name",
    [
        "claude-code",
        *(pytest.param(each, marks=pytest.mark.soak) for each in ("codex", "opencode")),
    ],
)
def test_a_title_request_between_turns_is_beside_the_conversation(watching, name):
    """One id for all: the head is the conversation, and its next turn is as warm as without.

    opencode asks for a title itself too, before the first turn.
    """
    shape = shape_of(name)
    shape["headers"]["x-keepwarm-agent"] = "coder"
    with watching(shape["calls"]) as watched:
        player = Player(shape, watched.url, CLIENTS[name])
        for turn in range(len(shape["turns"])):
            player.send(turn)
            title = {"messages": [{"role": "user", "content": f"A title for turn {turn}, please."}]}
            watched.live.post("/v1/chat/completions", title, **{"x-keepwarm-agent": "coder"})
        turns = watched.turns()
        watched.host.engine.wait_until_saved()
        agent = watched.live.get("/v1/agents/coder").json()
    assert all(turn.is_warm for turn in turns[1:])
    assert len(agent["turns"]) == len(turns)
    assert agent["n_tokens"] > turns[-1].asked.n_tokens
    assert all(branch["n_tokens"] < 100 for branch in agent["branches"][1:])
    assert len(agent["branches"][1:]) == 2 * len(shape["turns"]) - len(turns)


@pytest.mark.soak
def test_without_scrubbing_the_beginning_changes(watching):
    """The control: the changing line is there, and would cost."""
    shape = shape_of("claude-code")
    shape["headers"]["x-keepwarm-scrub"] = "none"
    with watching(shape["calls"]) as watched:
        Player(shape, watched.url, of_claude_code).play()
        with pytest.raises(AssertionError, match="the beginning of the prompt has changed"):
            watched.turns()


def test_a_tool_that_is_found_later_can_be_called(watching):
    """Claude Code's search adds a tool; the model may call it, and nothing is prefilled again."""
    shape = shape_of("claude-code")
    arguments = {"url": "http://127.0.0.1/", "prompt": "What is there?"}
    with watching({**shape["calls"], "WebFetch": arguments}) as watched:
        player = Player(shape, watched.url, of_claude_code)
        for turn in range(3):
            player.send(turn)
    (block,) = player.answers[2][0]["content"]
    assert (block["name"], block["input"]) == ("WebFetch", arguments)
    assert '"name": "WebFetch"' not in watched.host.asked[1].text
    assert '"name": "WebFetch"' in watched.host.asked[2].text
    assert "Placeholder" not in watched.host.asked[2].text


def test_a_client_may_look_first_whether_there_is_a_server(idle):
    """Older versions of Claude Code ask for the head of the address itself."""
    assert httpx.head(idle.url, follow_redirects=True, timeout=300).status_code == 200


@pytest.mark.parametrize("client", ["claude", "codex", "opencode", "qwen", "aider", "any"])
def test_docs_page_shows_what_launch_prints(idle, client, capsys, monkeypatch):
    monkeypatch.setenv("KEEPWARM_HOME", str(idle.live.settings.home))
    launch(client, url=idle.url)
    shown = capsys.readouterr().out.replace(idle.url, "http://127.0.0.1:8181")
    assert re.sub(r"\btiny\b", "org/model", shown) in PAGE.read_text()

"""Five turns of a coding agent: from the second on, only new tokens are computed."""

import copy
import json
import random
from itertools import takewhile
from pathlib import Path

import pytest

from keepwarm import config
from keepwarm.prefix.policy import Policy
from keepwarm.server.anthropic import request as messages
from keepwarm.server.anthropic.shapes import MessagesRequest
from keepwarm.server.http import scrub
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.openai import chat
from keepwarm.server.openai.shapes import ChatRequest
from keepwarm.server.responses import request as responses_in
from keepwarm.server.responses.shapes import ResponsesRequest
from keepwarm.text.request import KVOptions

CLIENTS = Path(__file__).parent.parent / "data" / "clients"
SETTINGS = config.load({})
CALLER = RequestFields("", None, Policy.READ_WRITE, False, KVOptions(), None)
SLACK = 16  # tokens that may be computed beside the new ones
ROOM = 100  # tokens of an answer: enough for a call
SCHEMA = {
    "type": "object",
    "properties": {"done": {"enum": ["yes", "no"]}},
    "required": ["done"],
    "additionalProperties": False,
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={:05x};"
COUNTER = "<total_tokens>{} tokens left</total_tokens>"
CHANGED = "The user has changed notes.txt while you worked."


class Conversation:
    """One client's conversation: what it sends in each turn, and what it keeps of the answers."""

    def __init__(self, fixture, path):
        self.body = json.loads((CLIENTS / f"{fixture}.json").read_text())
        self.path = path
        self.turn = 0

    def next(self, *, call):
        """The body of this turn: noise that changes, tools in another order, a forced answer."""
        self.turn += 1
        body = copy.deepcopy(self.body)
        body["tools"] = shuffled(body["tools"], self.turn)
        self.add_noise(body, BILLING.format(self.turn * 7919), COUNTER.format(90_000 // self.turn))
        self.force(body, call)
        return body


class ClaudeCode(Conversation):
    def __init__(self):
        super().__init__("claude-code", "/v1/messages?beta=true")

    def add_noise(self, body, billing, counter):
        body["system"][0]["text"] = billing
        usage = f"<system-reminder>\nToken usage: {self.turn}/9; 1 remaining\n</system-reminder>"
        if self.turn > 1:
            body["messages"].append({"role": "user", "content": [part("text", usage)]})
        body["messages"].append({"role": "system", "content": counter})

    def force(self, body, call):
        body["max_tokens"] = ROOM
        if call:
            body["tool_choice"] = {"type": "tool", "name": "read"}
        else:
            body["output_config"]["format"] = {"type": "json_schema", "schema": SCHEMA}

    def take(self, answer):
        self.body["messages"].append({"role": "assistant", "content": answer["content"]})
        blocks = answer["content"]
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        calls = [b for b in blocks if b["type"] == "tool_use"]
        return text, [(b["id"], b["name"], json.dumps(b["input"])) for b in calls]

    def result(self, call_id, text):
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        self.body["messages"].append({"role": "user", "content": [block]})

    def say(self, text, role="user"):
        self.body["messages"].append({"role": role, "content": [part("text", text)]})

    def request(self, body):
        return messages.request_of(MessagesRequest.model_validate(body), CALLER, SETTINGS)


class Codex(Conversation):
    def __init__(self):
        super().__init__("codex", "/v1/responses")

    def add_noise(self, body, billing, counter):
        body["instructions"] = f"{billing}\n{body['instructions']}"
        body["input"].append(self.message("developer", counter))

    def force(self, body, call):
        body["max_output_tokens"] = ROOM
        if call:
            body["tool_choice"] = {"type": "function", "name": "read"}
        else:
            wanted = {"type": "json_schema", "name": "verdict", "schema": SCHEMA}
            body["text"] = {"format": wanted}

    def take(self, answer):
        self.body["input"] += answer["output"]
        texts = [i["content"][0]["text"] for i in answer["output"] if i["type"] == "message"]
        calls = [i for i in answer["output"] if i["type"] == "function_call"]
        return "".join(texts), [(i["call_id"], i["name"], i["arguments"]) for i in calls]

    def result(self, call_id, text):
        item = {"type": "function_call_output", "call_id": call_id, "output": text}
        self.body["input"].append(item)

    def say(self, text, role="user"):
        role = "developer" if role == "system" else role
        self.body["input"].append(self.message(role, text))

    def message(self, role, text):
        return {"type": "message", "role": role, "content": [part("input_text", text)]}

    def request(self, body):
        shaped = ResponsesRequest.model_validate(body)
        items = responses_in.items_of(shaped.input)
        return responses_in.request_of(shaped, items, CALLER, SETTINGS)


class Opencode(Conversation):
    def __init__(self):
        super().__init__("opencode", "/v1/chat/completions")

    def add_noise(self, body, billing, counter):
        body["messages"][0]["content"] = f"{billing}\n{body['messages'][0]['content']}"
        body["messages"].append({"role": "system", "content": counter})

    def force(self, body, call):
        body["max_tokens"] = ROOM
        if call:
            body["tool_choice"] = {"type": "function", "function": {"name": "read"}}
        else:
            wanted = {"name": "verdict", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}

    def take(self, answer):
        message = answer["choices"][0]["message"]
        self.body["messages"].append(message)
        calls = [(c["id"], c["function"]) for c in message.get("tool_calls") or ()]
        return message["content"] or "", [(i, f["name"], f["arguments"]) for i, f in calls]

    def result(self, call_id, text):
        self.body["messages"].append({"role": "tool", "tool_call_id": call_id, "content": text})

    def say(self, text, role="user"):
        self.body["messages"].append({"role": role, "content": text})

    def request(self, body):
        return chat.request_of(ChatRequest.model_validate(body), CALLER, SETTINGS)


def part(kind, text):
    return {"type": kind, "text": text}


def shuffled(value, seed):
    """The same JSON with its lists of tools and all its keys in another order."""
    order = random.Random(seed)
    tools = [reordered(tool, order) for tool in value]
    order.shuffle(tools)
    return tools


def reordered(value, order):
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: reordered(value[key], order) for key in keys}
    return value


def generated(text, calls):
    """What the model wrote for this answer, in the format in which it is taught to call."""
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for _, name, arguments in calls
    ]
    return "\n".join([text] * bool(text) + written)


def n_common(one, two):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def take_turns(live, client, n_turns, **headers):
    """What each turn recomputed, what was new in it, and the prompt as the model saw it."""
    engine = live.host.engine
    before, turns = "", []
    for turn in range(1, n_turns + 1):
        body = client.next(call=turn in (1, 3))
        request = scrub.scrub_request(client.request(body), scrub.select_rules())
        text = engine.prepare(request).prompt.text
        new = text[n_common(before, text) :]
        response = live.post(client.path, body, **headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        n_new = len(engine.model.tokenizer.encode(new, add_special_tokens=False))
        turns.append((answer["keepwarm"], n_new, text))
        said, calls = client.take(answer)
        before = text + generated(said, calls)
        if turn == 2:
            client.say("Then change it, please.")
            client.say(CHANGED, role="system")
        elif turn == 4:
            client.say("And now the last of it.")
        for call_id, *_ in calls:
            client.result(call_id, f"1\tA line of turn {turn}.\n2\tAnother one.")
    return turns


@pytest.mark.parametrize(("client", "n_turns"), [(ClaudeCode, 5), (Codex, 4), (Opencode, 4)])
def test_coding_agent_computes_only_what_is_new_from_the_second_turn_on(live, client, n_turns):
    """A changing billing line, a counter, tools reordered, a system message in the middle."""
    turns = take_turns(live, client(), n_turns)
    for receipt, n_new, _ in turns[1:]:
        assert receipt["recomputed"] <= n_new + SLACK
        assert receipt["prompt_tokens"] == sum(receipt["reused"].values()) + receipt["recomputed"]
        assert n_new < receipt["prompt_tokens"] / 4
    for receipt, _, text in turns:
        assert {"billing-header", "total-tokens"} <= set(receipt["scrubbed"])
        assert not any(noise in text for noise in ("cch=", "total_tokens", "Token usage"))
    last = turns[-1][2]
    places = [last.find(words) for words in ("turn 1", "Then change it", CHANGED, "turn 3")]
    assert places == sorted(places)
    assert places[0] > 0


def test_coding_agent_without_scrubbing_computes_its_second_turn_again(live):
    """The control: the noise is there, and it costs."""
    turns = take_turns(live, ClaudeCode(), 2, **{"X-Keepwarm-Scrub": "none"})
    for receipt, n_new, _ in turns[1:]:
        assert receipt["recomputed"] > n_new + SLACK
        assert receipt["scrubbed"] == []

"""Ollama's requests as the engine gets them, and its answers as lines."""

import asyncio
import json
import math
from functools import partial

import pytest
from transformers import PreTrainedTokenizerFast

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.server.http.sse import LineStream
from keepwarm.server.ollama import request as requests
from keepwarm.server.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from keepwarm.server.ollama.routes import AnswerLines, AnswerMeta, generate_part
from keepwarm.server.openai.completions import FILL_INS, required_fill_in
from keepwarm.text.request import Done, Finished, Progress, Request, Started
from tests.kit.checkpoints import make_tokenizer
from tests.server.http.test_sse import RECEIPT, USAGE, Client, scripted

FIELDS = Request()
SETTINGS = config.load({})
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
LACKING = partial(required_fill_in, TOKENIZER, SETTINGS)
ASK = {"role": "user", "content": "How many leaves?"}


def chat(*messages, **fields):
    body = OllamaChatRequest.model_validate(
        {"model": "m", "messages": list(messages) or [ASK], **fields}
    )
    return requests.chat_request(body, body.messages, FIELDS, SETTINGS)


def generate(settings=SETTINGS, fill_in=LACKING, **fields):
    body = OllamaGenerateRequest.model_validate({"model": "m", "prompt": "Once", **fields})
    return requests.generate_request(body, FIELDS, settings, fill_in)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((0, 0), ("0", 0), ("0s", 0), (300, 300), (0.5, 0.5), ("1h30m", 5400), ("10m", 600)),
        *((-1, math.inf), ("-1", math.inf), ("-5m", math.inf), ("1.5s", 1.5), ("250ms", 0.25)),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(given, seconds):
    body = OllamaChatRequest.model_validate({"model": "m", "keep_alive": given})
    assert requests.keep_alive_s(body) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "1e3s", "9" * 400 + "h"])
def test_keep_alive_that_is_no_duration_is_refused(given):
    body = OllamaChatRequest.model_validate({"model": "m", "keep_alive": given})
    with pytest.raises(BadField, match="keep_alive"):
        requests.keep_alive_s(body)


def test_calls_have_the_same_ids_every_time():
    """Ollama's clients drop ids; results belong to the calls by their names and order."""
    made = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("f", "g", "f")]
    said = [
        *(ASK, {"role": "assistant", "content": "", "tool_calls": made, "thinking": "Well."}),
        *({"role": "tool", "content": c, "tool_name": n} for n, c in (("g", "2"), ("f", "1"))),
        *({"role": "tool", "content": "3"}, {"role": "Tool", "content": "4"}),
    ]
    first, again = chat(*said), chat(*said, ASK)
    assert again.messages[:6] == first.messages
    calls = first.messages[1]["tool_calls"]
    ids = [call["id"] for call in calls]
    assert all(len(each) == 9 and each.isalnum() for each in ids)  # as Mistral's templates ask
    assert len(set(ids)) == 3
    assert json.loads(calls[0]["function"]["arguments"]) == {"n": 1}
    assert first.messages[1]["reasoning_content"] == "Well."
    results = [(m["content"], m.get("tool_call_id")) for m in first.messages[2:]]
    assert results == [("2", ids[1]), ("1", ids[0]), ("3", ids[2]), ("4", None)]


def test_ids_of_the_client_are_kept():
    call = {"id": "mine", "function": {"name": "f", "arguments": {}}}
    made = {"role": "assistant", "tool_calls": [call]}
    asked = chat(ASK, made, {"role": "tool", "content": "1", "tool_call_id": "mine"})
    assert asked.messages[1]["tool_calls"][0]["id"] == "mine"
    assert (asked.messages[2]["tool_call_id"], asked.messages[2]["name"]) == ("mine", "f")


def test_ids_of_results_alone_are_those_of_the_calls():
    """litellm drops the id of a call and keeps that of its result."""
    made = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    asked = chat(ASK, made, {"role": "tool", "content": "1", "tool_call_id": "call_1"})
    assert asked.messages[1]["tool_calls"][0]["id"] == asked.messages[2]["tool_call_id"]
    alone = chat(ASK, {"role": "tool", "content": "1", "tool_call_id": "call_1"})
    assert alone.messages[1]["tool_call_id"] == "call_1"


def test_image_of_generate_is_refused_or_noted():
    with pytest.raises(BadField, match=r"images\[0\]"):
        generate(images=["aGk="])
    lenient = config.load({}, skip_unreadable=True)
    assert generate(lenient, images=["aGk="]).unread == ("image",)


def test_prompt_of_generate_is_a_message_or_raw_or_filled_in():
    assert generate(raw=True).prompt == "Once"
    asked = generate(system="Be brief.")
    assert [message["role"] for message in asked.messages] == ["system", "user"]
    assert generate(fill_in=lambda: FILL_INS[0], suffix="end").prompt.endswith("end<|fim_middle|>")
    for fields in (
        {"suffix": "end"},
        {"template": "{{ .Prompt }}"},
        {"context": [1, 2]},
        {"raw": True, "system": "Be brief."},
    ):
        with pytest.raises(BadField):
            generate(**fields)


# Answers.


def test_stream_of_lines_is_kept_alive_by_json_too():
    """Before the plan and after it: clients parse every line."""

    async def run():
        client = Client()
        answer, _ = scripted([Progress(1, 9)])
        lines = AnswerLines(AnswerMeta("m", generate_part))
        stream = LineStream(answer, lines)
        stream.keep_alive_s, stream.plan_s = 0.001, 0
        running = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))

        async def more(n):
            seen = len(client.sent)
            while len(client.sent) < seen + n:
                await asyncio.sleep(0.001)

        await more(3)
        answer.put(Started(RECEIPT))
        await more(3)
        for event in (Finished(0, "stop"), Done(USAGE, RECEIPT)):
            answer.put(event)
        await running
        return client.body

    said = [json.loads(each) for each in asyncio.run(run()).splitlines()]
    assert len(said) > 5
    assert all(each["response"] == "" for each in said)
    assert [each["done"] for each in said] == [False] * (len(said) - 1) + [True]

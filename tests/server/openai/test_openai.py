"""OpenAI's completions as pure functions: JSON to a request, events to chunks, errors."""

import json
from functools import partial

import pytest
from transformers import PreTrainedTokenizerFast

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.prefix.policy import Policy
from keepwarm.server.http.request_fields import RequestFields, agent_id
from keepwarm.server.http.sse import receipt_dict
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.chat import ChatStream
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.openai.completions import TextStream
from keepwarm.server.openai.logprobs import Pieces
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Finished,
    Format,
    KVOptions,
    Miss,
    Receipt,
    Result,
    Started,
    TokenInfo,
    ToolCall,
    ToolCalled,
    ToolChoice,
    TopLogprob,
    Usage,
)
from tests.kit.checkpoints import make_tokenizer

SETTINGS = config.load({})
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
CALLER = RequestFields("t", "me", Policy.READ_WRITE, False, KVOptions(), 60.0)
META = CompletionMeta("chatcmpl-1", 1700000000, "tiny")
RECEIPT = Receipt(9, {"live": 4, "disk": 4}, 1, 3.0, miss=Miss(8, 1, "new"))
USAGE = Usage(9, 8, 5, 2, 4.0, 100.0)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def asked(**fields):
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    return chat.request_of(ChatRequest.model_validate(body), CALLER, SETTINGS)


def completed(**fields):
    body = CompletionRequest.model_validate(fields)
    fill_in = partial(completions.required_fill_in, TOKENIZER, SETTINGS)
    return completions.requests_of(body, CALLER, fill_in)


# The request.


def test_plain_messages_pass_as_they_are():
    request = asked(messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert request.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
    ]
    assert (request.tenant, request.agent, request.timeout_s) == ("t", "me", 60.0)
    assert request.sampling.max_tokens is None


def test_lists_of_parts_stay_apart_and_developers_become_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    request = asked(messages=[{"role": "developer", "content": parts}])
    told = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert request.messages == [{"role": "system", "content": told}]


def test_calls_results_and_reasoning_are_kept():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    request = asked(messages=[said, result], tools=[WEATHER])
    assert request.messages[0]["tool_calls"] == [call]
    assert request.messages[0]["content"] == ""
    assert request.messages[0]["reasoning_content"] == "hm"
    assert request.messages[1]["tool_call_id"] == "c1"
    assert request.tools == [WEATHER]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_media_are_refused_by_name_and_place(kind):
    """A text model is never given media, so media never reuse a text prefix."""
    parts = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "http://x/y.png"}}]
    with pytest.raises(BadField, match=kind) as refused:
        asked(messages=[{"role": "user", "content": parts}])
    assert refused.value.param == "messages[0].content[1]"


def test_sampling_is_passed_on():
    sampling = asked(
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=-1,
        stop="END",
        logit_bias={"7": -100, "8": 2.5},
        presence_penalty=1,
        frequency_penalty=-1,
        logprobs=True,
        top_logprobs=3,
        n=2,
    ).sampling
    assert sampling.max_tokens == 5
    assert sampling.stop == ("END",)
    assert sampling.logit_bias == {7: -100, 8: 2.5}
    assert 0 <= sampling.seed < 2**63
    assert sampling.top_logprobs == 3
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert asked(max_tokens=4, stop=["a", "b"]).sampling.stop == ("a", "b")
    assert asked(logprobs=True).sampling.top_logprobs == 0
    assert asked().sampling.top_logprobs is None


def test_formats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert asked(response_format=wanted).format == Format(json=True, schema=schema)
    assert asked(response_format={"type": "json_object"}).format == Format(json=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    beside = asked(response_format={"type": "json_object", "schema": schema})
    assert beside.format == Format(schema=schema)
    assert asked(response_format={"type": "text"}).format is None
    with pytest.raises(BadField, match="schema is missing"):
        asked(response_format={"type": "json_schema"})


def test_tool_choice():
    named = {"type": "function", "function": {"name": "weather"}}
    assert asked(tools=[WEATHER]).tool_choice == ToolChoice("auto")
    assert asked(tools=[WEATHER], tool_choice="none").tool_choice == ToolChoice("none")
    assert asked(tools=[WEATHER], tool_choice=named).tool_choice == ToolChoice(
        "required", "weather"
    )
    alone = asked(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert alone.tool_choice == ToolChoice("required", None, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, param):
    with pytest.raises(BadField) as refused:
        asked(**fields)
    assert refused.value.param == param


def test_thinking():
    assert asked().thinking is None
    assert asked(reasoning_effort="none").thinking is False
    hard = asked(reasoning_effort="high")
    assert (hard.thinking, hard.template_options) == (True, {"reasoning_effort": "high"})
    off = asked(chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert (off.thinking, off.template_options) == (False, {"x": 1})


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_has_four_forms(prompt, wanted):
    requests = completed(prompt=prompt)
    assert [request.prompt for request in requests] == wanted
    assert requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "suffix": "b"}, "echo"),
    ],
)
def test_completions_that_are_refused(fields, param):
    with pytest.raises(BadField) as refused:
        completed(**fields)
    assert refused.value.param == param


def test_hints_become_agents():
    assert agent_id("session-1") == "session-1"
    assert agent_id(None) is agent_id("") is None
    odd = agent_id("../../etc/passwd ☃")
    assert odd == agent_id("../../etc/passwd ☃")
    assert odd.startswith("key-")


# What is not even a request.


def test_unknown_fields_are_ignored():
    assert asked(service_tier="auto", store=True, metadata={"a": "b"}).n == 1


# The answer.


def frames(encoder, *events):
    text = b"".join(encoder.event(event) for event in events).decode()
    lines = [line[6:] for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


CALL = ToolCall("call_1", "weather", '{"place": "here"}')


def test_a_whole_answer():
    choice = Choice("Hello", "hm", (), "stop", None, ())
    called = Choice("", "", (CALL,), "tool_calls", None, ())
    answer = chat.completion(META, Result((choice, called), USAGE, RECEIPT), None)
    first, second = answer["choices"]
    assert first["message"]["content"] == "Hello"
    assert first["message"]["reasoning_content"] == first["message"]["reasoning"] == "hm"
    assert second["message"]["content"] is None
    assert second["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"place": "here"}',
    }
    assert second["finish_reason"] == "tool_calls"
    assert answer["usage"]["total_tokens"] == 14
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert answer["keepwarm"]["miss"] == {
        "position": 8,
        "message": 1,
        "reason": "new",
        "nearest": 0,
    }


def test_a_stream_ends_with_how_it_ended_and_the_receipt():
    encoder = ChatStream(META, 1, False, None)
    chunks = frames(
        encoder,
        Started(RECEIPT),
        Delta(0, reasoning="hm"),
        Delta(0, "Hi"),
        Delta(0),
        Finished(0, "length"),
        Done(USAGE, RECEIPT),
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "Hi"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [
        None,
        None,
        None,
        "length",
    ]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}
    assert "usage" not in chunks[-1]
    assert chunks[-1]["keepwarm"] == receipt_dict(RECEIPT)


def test_tool_calls_stream_with_their_index():
    encoder = ChatStream(META, 1, True, None)
    second = CALL._replace(id="call_2")
    chunks = frames(
        encoder,
        ToolCalled(0, CALL),
        ToolCalled(0, second),
        Finished(0, "tool_calls"),
        Done(USAGE, RECEIPT),
    )
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [delta["tool_calls"][0] for delta in deltas if delta]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert [call.get("id") for call in calls] == ["call_1", None, "call_2", None]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert calls[1]["function"] == {"arguments": '{"place": "here"}'}


def test_choices_stream_beside_each_other():
    encoder = ChatStream(META, 2, True, None)
    chunks = frames(
        encoder,
        Started(RECEIPT),
        Delta(1, "b"),
        Finished(1, "stop"),
        Delta(0, "a"),
        Finished(0, "stop"),
        Done(USAGE, RECEIPT),
    )
    *chunks, last = chunks
    seen = [
        (c["index"], c["delta"].get("content"), c["finish_reason"]) for [c] in map(_choices, chunks)
    ]
    assert seen == [
        (0, "", None),
        (1, "", None),
        (1, "b", None),
        (1, None, "stop"),
        (0, "a", None),
        (0, None, "stop"),
    ]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


def _choices(chunk):
    return chunk["choices"]


class Wrapped:
    """A tokenizer as mlx-lm wraps it, as far as pieces need it."""

    def __init__(self):
        self._inner = make_tokenizer()
        self.eos_token_ids = [self._inner.token_to_id("<|im_end|>")]
        self.convert_ids_to_tokens = self._inner.id_to_token
        self.encode = lambda text: self._inner.encode(text).ids

    def decode(self, tokens, clean_up_tokenization_spaces=False):
        return self._inner.decode(tokens, skip_special_tokens=False)


def test_logprobs_show_text_and_bytes_and_join_to_the_answer():
    tokenizer = Wrapped()
    text = "the ☃ answer"
    ids = tokenizer.encode(text)
    infos = [
        TokenInfo(token, -0.5, (TopLogprob(token, -0.5), TopLogprob(5, float("-inf"))))
        for token in ids
    ]
    infos.append(TokenInfo(tokenizer.eos_token_ids[0], -0.1))
    pieces = Pieces(tokenizer)
    choice = Choice(text, "", (), "stop", None, tuple(infos))
    answer = chat.completion(META, Result((choice,), USAGE, RECEIPT), pieces)
    shown = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for each in shown for byte in each["bytes"]).decode() == text
    assert shown[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert len(shown) == len(ids)
    json.dumps(answer, allow_nan=False)
    whole = completions.completion(META, Result((choice,), USAGE, RECEIPT), [""], pieces)
    written = whole["choices"][0]["logprobs"]
    assert written["token_logprobs"] == [-0.5] * len(ids)
    assert written["text_offset"][0] == 0


def test_text_streams_echo_their_prompt_first():
    encoder = TextStream(META, ["Once"], False, None)
    chunks = frames(
        encoder, Started(RECEIPT), Delta(0, " upon"), Finished(0, "stop"), Done(USAGE, RECEIPT)
    )
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Once", " upon", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["keepwarm"]["exact"] is True

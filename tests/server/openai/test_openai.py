"""OpenAI's completions as pure functions: events to chunks."""

import json

from keepwarm.server.http.request_fields import agent_id
from keepwarm.server.http.sse import receipt_dict
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.chat import ChatStream
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.openai.completions import TextStream
from keepwarm.server.openai.logprobs import Pieces
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Finished,
    Miss,
    Receipt,
    Result,
    Started,
    TokenInfo,
    ToolCall,
    ToolCalled,
    TopLogprob,
    Usage,
)
from tests.kit.checkpoints import make_tokenizer

META = CompletionMeta("chatcmpl-1", 1700000000, "tiny")
RECEIPT = Receipt(9, {"live": 4, "disk": 4}, 1, 3.0, miss=Miss(8, 1, "new"))
USAGE = Usage(9, 8, 5, 2, 4.0, 100.0)


def test_hints_become_agents():
    assert agent_id("session-1") == "session-1"
    assert agent_id(None) is agent_id("") is None
    odd = agent_id("../../etc/passwd ☃")
    assert odd == agent_id("../../etc/passwd ☃")
    assert odd.startswith("key-")


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

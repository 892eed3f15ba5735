"""What is special to chat completions: choices, logprobs, formats, older and custom calls."""

import json
import re
from dataclasses import replace

import openai
import pytest

from keepwarm import config
from keepwarm.engine.answer import collect
from keepwarm.models.load import load
from keepwarm.server.http import sse
from keepwarm.server.http.request_fields import agent_id
from keepwarm.server.http.tools import custom_input
from keepwarm.server.openai import chat
from keepwarm.server.openai.chat import ChatStream, call_style_of, completion
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.openai.completions import completion as text_completion
from keepwarm.server.openai.shapes import ChatRequest
from keepwarm.text.detokenize import Pieces
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Finished,
    Receipt,
    Result,
    Started,
    TokenInfo,
    ToolCall,
    ToolCallDelta,
    ToolCalled,
    TopLogprob,
    Usage,
)
from keepwarm.text.template import write
from tests.kit.checkpoints import make_tokenizer, write_checkpoint
from tests.kit.threads import threads_of
from tests.server.apis import events_of
from tests.server.conftest import serve

USER = {"role": "user", "content": "What is the answer to the question?"}
META = CompletionMeta("chatcmpl-1", 1700000000, "tiny")
RECEIPT = Receipt(9, {"live": 4, "disk": 4}, 1, 3.0)
USAGE = Usage(9, 8, 5, 2, 4.0, 100.0)
END = Done(USAGE, RECEIPT)
YES_OR_NO = 'root ::= "yes" | "no"'


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


def ask(client, **options):
    asked = {"model": "m", "messages": [USER], "temperature": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(**asked)


def joined(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# Choices and tokens


def test_stream_without_usage_has_the_receipt_in_its_last_choice(client):
    chunks = list(ask(client, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason
    assert chunks[-1].model_extra["keepwarm"]["prompt_tokens"] > 0


def test_choices_of_a_seed_are_the_same_again_and_streamed(client):
    options = {"n": 3, "temperature": 1.0, "seed": 7}
    first, second = ask(client, **options), ask(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    chunks = list(ask(client, stream=True, **options))
    assert [joined(chunks, index) for index in range(3)] == texts
    none = ask(client, max_tokens=0, n=2)
    assert [(c.message.content, c.finish_reason) for c in none.choices] == [("", "length")] * 2


def test_logprobs_join_to_the_answer_whole_and_streamed(live, client):
    bias = {str(token): -100 for token in live.host.engine.model.tokenizer.eos_token_ids}
    options = {"logprobs": True, "top_logprobs": 2, "logit_bias": bias}
    choice = ask(client, **options).choices[0]
    shown = choice.logprobs.content
    assert len(shown) == 8
    text = bytes(byte for token in shown for byte in token.bytes).decode(errors="replace")
    assert text == choice.message.content
    for token in shown:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    chunks = list(ask(client, stream=True, **options))
    logprobs = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [token.token for each in logprobs for token in each.content] == [
        token.token for token in shown
    ]


def test_logit_bias_and_top_p_of_zero_decide_the_token(live, client):
    token = live.host.engine.model.tokenizer.encode("x", add_special_tokens=False)[0]
    answer = ask(client, logit_bias={str(token): 100}, max_tokens=5).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("xxxxx", "length")
    likeliest = ask(client, top_p=0, temperature=2, max_tokens=4)
    assert likeliest.choices[0].message == ask(client, max_tokens=4).choices[0].message


def test_ignore_eos_goes_on_up_to_the_limit(live, client):
    ends = dict.fromkeys(map(str, live.host.engine.model.tokenizer.eos_token_ids), 100)
    assert ask(client, logit_bias=ends, max_tokens=5).choices[0].finish_reason == "stop"
    answer = ask(client, logit_bias=ends, max_tokens=5, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)


def test_choices_stream_beside_each_other():
    encoder = ChatStream(META, 2, True, None)
    events = [
        *(Started(RECEIPT), Delta(1, "b"), Finished(1, "stop")),
        *(Delta(0, "a"), Finished(0, "stop"), END),
    ]
    *chunks, last = events_of(b"".join(map(encoder.event, events)).decode())
    seen = [
        (choice["index"], choice["delta"].get("content"), choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert seen == [
        *((0, "", None), (1, "", None), (1, "b", None)),
        *((1, None, "stop"), (0, "a", None), (0, None, "stop")),
    ]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


class Wrapped:
    """A tokenizer as mlx-lm wraps it, as far as pieces need it."""

    def __init__(self):
        self._inner = make_tokenizer()
        self.eos_token_ids = [self._inner.token_to_id("<|im_end|>")]
        self.convert_ids_to_tokens = self._inner.id_to_token
        self.encode = lambda text: self._inner.encode(text).ids

    def decode(self, tokens, clean_up_tokenization_spaces=False):
        return self._inner.decode(tokens, skip_special_tokens=False)


def test_logprobs_are_written_off_the_event_loop(client, monkeypatch):
    names = threads_of(monkeypatch, chat, "chat_logprobs")
    monkeypatch.setattr(sse, "MANY_LOGPROBS", 0)
    ask(client, logprobs=True, top_logprobs=1)
    (name,) = names
    assert name.startswith("keepwarm-prepare")


def test_logprobs_of_parts_of_characters_are_bytes_and_minus_infinity_is_a_number():
    tokenizer, text = Wrapped(), "the ☃ answer"
    ids = tokenizer.encode(text)
    tops = [(TopLogprob(token, -0.5), TopLogprob(5, float("-inf"))) for token in ids]
    infos = [TokenInfo(token, -0.5, top) for token, top in zip(ids, tops, strict=True)]
    infos.append(TokenInfo(tokenizer.eos_token_ids[0], -0.1))
    result = Result((Choice(text, "", (), "stop", None, tuple(infos)),), USAGE, RECEIPT)
    answer = completion(META, result, Pieces(tokenizer))
    shown = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for each in shown for byte in each["bytes"]).decode() == text
    assert shown[0]["top_logprobs"][1]["logprob"] == -9999.0
    assert len(shown) == len(ids)
    json.dumps(answer, allow_nan=False)
    written = text_completion(META, result, [""], Pieces(tokenizer))["choices"][0]["logprobs"]
    assert written["token_logprobs"] == [-0.5] * len(ids)
    assert written["text_offset"] == [0, 2, 3, 4, 5, 5, 5], "the snowman is three tokens"


# Formats of OpenAI, llama.cpp and vLLM


def test_json_object_is_json(client):
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=24).choices[0]
    assert answer.message.content.lstrip().startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


HUES = ["red/green", 'the "blue"', "\n"]
FORMATS = [
    ({"grammar": YES_OR_NO}, "yes|no"),
    ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ({"json_schema": {"const": "42"}}, '"42"'),
    ({"structured_outputs": {"choice": HUES}}, "|".join(map(re.escape, HUES))),
    ({"structured_outputs": {"regex": r"[0-9]{2}/[a-c]{2}\/\\\\"}}, r"[0-9]{2}/[a-c]{2}/\\\\"),
    ({"structured_outputs": {"json": {"enum": ["oak"]}}}, '"oak"'),
    ({"structured_outputs": {"json": '{"enum": ["oak"]}'}}, '"oak"'),
    ({"structured_outputs": {"grammar": YES_OR_NO}}, "yes|no"),
]


@pytest.mark.parametrize(("wanted", "pattern"), FORMATS)
def test_answer_follows_the_formats_of_other_servers(client, wanted, pattern):
    answer = ask(client, max_tokens=16, extra_body=wanted).choices[0].message.content
    assert re.fullmatch(pattern, answer), answer
    asked = {"model": "m", "prompt": "Well?", "max_tokens": 16, "extra_body": wanted}
    assert re.fullmatch(pattern, client.completions.create(**asked).choices[0].text)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"grammar": 'root ::= "yes'}, "GBNF grammar cannot be read"),
        ({"grammar": 'other ::= "yes"'}, "GBNF grammar cannot be read"),
        ({"grammar": 'root ::= start\nstart ::= "yes"'}, "Rule 'start' already exists"),
        ({"grammar": f"root ::= {'(' * 5000}"}, "GBNF grammar cannot be read"),
        ({"grammar": "root ::= " + '"a" ' * 5000}, "characters of GBNF; send at most 16,384"),
        ({"grammar": "nonsense"}, "cannot be compiled"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"regex": "[.*"}}, "cannot be compiled"),
        ({"structured_outputs": {"regex": {"a": 1}}}, "regex"),
        ({"structured_outputs": {"grammar": ""}}, "cannot be compiled"),
        ({"structured_outputs": {"json": "{"}}, "not a JSON schema"),
        ({"structured_outputs": {"json": "[]"}}, "not a JSON schema"),
        ({"structured_outputs": {"json": {"properties": {"foo": "bar"}}}}, "cannot be compiled"),
        ({"structured_outputs": {"json": f'{{"minimum": {10**400}}}'}}, "number out of range"),
    ],
)
def test_format_that_cannot_be_read_is_refused(client, wanted, why):
    with pytest.raises(openai.BadRequestError, match=why):
        ask(client, max_tokens=1, extra_body=wanted)


# Custom tools, and functions from before there were tools

PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
OLD = {"name": "read", "parameters": {"type": "object", "additionalProperties": False}}
CALL = ToolCall("c1", "patch", '{"input": "+ \\"ä\\""}')
READING = ToolCall("c2", "read", "{}")


def told(body, *events):
    """The choice of an answer with these events, whole, and its deltas."""
    style = call_style_of(ChatRequest.model_validate({"messages": [USER], **body}))
    events = [Started(RECEIPT), *events, Finished(0, "tool_calls"), END]
    whole = completion(META, collect(events), None, style)
    encoder = ChatStream(META, 1, False, None, style)
    chunks = events_of(b"".join(map(encoder.event, events)).decode())
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    return whole["choices"][0], [chunk["choices"][0]["delta"] for chunk in chunks[1:]]


def test_call_of_a_custom_tool_is_told_as_one_and_in_one_piece():
    begun = ToolCallDelta(0, "c1", "patch", '{"in')
    calls = (begun, ToolCalled(0, CALL), ToolCalled(0, READING))
    choice, deltas = told({"tools": [PATCH, READ]}, *calls)
    custom, function = choice["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": '+ "ä"'})
    assert (function["type"], function["function"]["name"]) == ("function", "read")
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    assert [piece["index"] for piece in pieces] == [0, 0, 1, 1]
    assert pieces[0]["custom"] == {"name": "patch", "input": ""}
    assert pieces[1] == {"index": 0, "custom": {"input": '+ "ä"'}}


@pytest.mark.parametrize("arguments", ["{", "[]", '{"input": 5}', '{"other": "x"}'])
def test_input_of_a_custom_tool_that_is_no_text_is_shown_as_it_is(arguments):
    assert custom_input(arguments) == arguments


def test_half_a_character_in_the_input_of_a_custom_tool_can_be_sent():
    custom_input('{"input": "a \\ud83e fox"}').encode()


def test_call_of_an_older_function_is_told_as_then():
    pieces = [ToolCallDelta(0, "c2", "read", ""), ToolCallDelta(0, "c2", "read", "{}")]
    choice, deltas = told({"functions": [OLD]}, *pieces, ToolCalled(0, READING))
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "read", "arguments": "{}"}
    calls = [delta["function_call"] for delta in deltas if delta]
    assert calls == [{"name": "read", "arguments": ""}, {"arguments": ""}, {"arguments": "{}"}]


def test_older_function_is_called(client):
    answer = ask(client, max_tokens=60, functions=[OLD], function_call={"name": "read"})
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.function_call.name == "read"


# Answers that the client began

BEGUN = {"role": "assistant", "content": "The answer is ("}
GOING_ON = {"continue_final_message": True}


def test_answer_goes_on_where_the_client_stopped(live, client):
    """As if the whole text were sent as it is; the next turn finds all of it warm."""
    question = {"role": "user", "content": "What is the answer?"}
    began = {"messages": [question, BEGUN], "max_tokens": 12}
    text = write(live.host.engine.model.tokenizer, [question]) + BEGUN["content"]
    whole = client.completions.create(model="m", prompt=text, max_tokens=12, temperature=0)
    said = whole.choices[0].text
    other = ask(client, **began).choices[0].message.content
    assert other != said  # else all of this could be said of any answer
    assert live.anthropic().messages.create(model="m", **began).content[0].text == said
    agent = {"extra_headers": {"X-Keepwarm-Agent": "begun"}}
    for extra in ({"chat_template_kwargs": GOING_ON}, GOING_ON):
        answer = ask(client, **began, extra_body=extra, **agent)
        assert answer.choices[0].message.content == said
        assert answer.usage.prompt_tokens == whole.usage.prompt_tokens
    talk = [question, {"role": "assistant", "content": BEGUN["content"] + said}, question]
    usage = ask(client, messages=talk, max_tokens=1).usage
    n_first = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= n_first - 1
    going_on = live.openai(base_url=f"{live.url}/v1/agents/begun")
    again = ask(going_on, messages=[question], max_tokens=1)
    assert again.usage.prompt_tokens == usage.prompt_tokens


@pytest.mark.parametrize(
    ("extra", "messages", "why"),
    [
        ({"add_generation_prompt": False}, [USER, BEGUN], "no answer is asked for"),
        (GOING_ON | {"add_generation_prompt": True}, [USER, BEGUN], "exclude each other"),
        (GOING_ON, [USER], "cannot be continued"),
    ],
)
def test_what_cannot_be_continued_is_refused(live, extra, messages, why):
    answer = live.post("/v1/chat/completions", {"messages": messages, **extra})
    assert (answer.status_code, why in answer.json()["error"]["message"]) == (400, True)


# Models, and what an answer says of its own


def test_fingerprint_names_the_model_and_its_options(live, serving):
    def fingerprints(live):
        client = live.openai()
        chat = ask(client, max_tokens=1)
        text = client.completions.create(model="m", prompt="Hi", max_tokens=1)
        return {e.system_fingerprint for e in (chat, text, *ask(client, max_tokens=1, stream=True))}

    (plain,) = fingerprints(live)
    with serving(max_kv_size=4096) as other:
        assert fingerprints(other).isdisjoint({plain})


def test_models_are_listed_and_shown_in_the_form_of_the_client(live, client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("tiny").id == "tiny"
    assert client.models.retrieve("tiny:latest").id == "tiny"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-9")
    assert refused.value.code == "model_not_found"
    claude = live.anthropic()
    (other,) = claude.models.list()
    assert (other.id, other.type, other.lifecycle) == ("tiny", "model", "active")
    assert other.created_at.timestamp() == live.host.created
    assert other.max_input_tokens == live.host.engine.model.n_context
    assert claude.models.retrieve("tiny") == other


MAKERS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


def test_sampling_of_a_models_own_file_is_shown_and_the_operator_speaks_first(served_at):
    shown = MAKERS | {"min_p": 0.0, "repetition_penalty": 1.0}
    del shown["do_sample"]
    with served_at() as live, live.openai() as client:
        assert live.get("/v1/models").json()["data"][0]["sampling"] == shown
        silent = client.responses.create(model="m", input="Hello", max_output_tokens=2)
        asked = {"max_output_tokens": 2, "temperature": 0, "top_p": 0.5}
        exact = client.responses.create(model="m", input="Hello", **asked)
        for found, wanted in ((silent, (0.6, 0.95)), (exact, (0, 0.5))):
            assert (found.temperature, found.top_p) == wanted
            assert client.responses.retrieve(found.id) == found
    for settings, temperature in (({"sampling": "greedy"}, 0.0), ({"temperature": 0.3}, 0.3)):
        with served_at(**settings) as live:
            assert live.get("/v1/models/tiny").json()["sampling"]["temperature"] == temperature


@pytest.fixture
def served_at(served_model, tmp_path):
    """A function: a server whose model has this file, with these settings."""

    def start(**values):
        settings = config.load({"KEEPWARM_HOME": str(tmp_path)}, **values)
        return serve(replace(served_model, generation_config=MAKERS), settings)

    return start


@pytest.mark.parametrize(("written", "read"), [(json.dumps(MAKERS), MAKERS), ("{", {}), ("", {})])
def test_file_of_sampling_is_read_with_the_model(tmp_path, written, read):
    """One that cannot be read is none, as for mlx-lm."""
    checkpoint = write_checkpoint(tmp_path / "model")
    file = checkpoint / "generation_config.json"
    file.unlink() if not written else file.write_text(written)
    assert load(str(checkpoint), config.load({})).generation_config == read


def test_openapi_document_has_the_shapes_of_requests(live):
    chat = live.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
    assert "422" not in chat["responses"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("ChatRequest")
    assert live.get("/docs").status_code == 200


def test_agent_is_named_by_any_hint_and_a_name_that_is_no_id_is_hashed():
    assert agent_id("session-1") == "session-1"
    assert agent_id(None) is agent_id("") is None
    odd = agent_id("../../etc/passwd ☃")
    assert odd == agent_id("../../etc/passwd ☃")
    assert odd.startswith("key-")

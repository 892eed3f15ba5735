"""What is special to OpenAI's responses: ids, items, namespaces, logprobs, encoded reasoning."""

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from keepwarm import config
from keepwarm.models.load import load
from keepwarm.server.http.problems import Problem
from keepwarm.server.responses.events import ResponseStream
from keepwarm.server.responses.request import (
    ResponseTool,
    decode_reasoning,
    encode_reasoning,
    offered_tools,
)
from keepwarm.text.request import Delta, Done, Finished, Started, ToolCall, ToolCalled
from tests.kit.scripted import write_thoughtful
from tests.server.apis import RESPONSES
from tests.server.conftest import N_CONTEXT, serve
from tests.server.test_event_contract import RECEIPT, USAGE, responses_builder

WORDS = "What is the answer to the question?"
READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True}
SEARCH = {"type": "web_search"}
PATCH = {"type": "custom", "name": "patch"}
DELTA = "response.output_text.delta"
NAMESPACE = {"type": "namespace", "name": "files", "description": "Files", "tools": [READ, PATCH]}


@pytest.mark.parametrize("text", ["Hm.", "Grüße, ☃\n", "\0=+/"])
def test_encoded_reasoning_comes_back(text):
    assert decode_reasoning(encode_reasoning(text)) == text


@pytest.mark.parametrize("foreign", [None, "", "gAAAAB", "keepwarm1:%%%", "keepwarm1:/w=="])
def test_reasoning_of_another_server_is_ignored(foreign):
    assert decode_reasoning(foreign) == ""


def test_functions_are_offered_and_hosted_tools_left_out():
    tools = offered_tools([ResponseTool.model_validate(tool) for tool in (READ, SEARCH, NAMESPACE)])
    names = [tool["function"]["name"] for tool in tools.tools]
    assert names == ["read", "files__read", "files__patch"]
    assert tools.names["files__read"] == ("read", "files", False)
    assert tools.names["files__patch"].custom
    assert tools.ignored == ["web_search"]


# Answers


def streamed(events, builder):
    stream = ResponseStream(builder)
    return RESPONSES.events(b"".join(map(stream.event, events)).decode())


def test_response_holds_the_options_and_names_of_its_request():
    kept = []
    fields = {
        "tools": [NAMESPACE, SEARCH],
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
    }
    builder = responses_builder(kept.append, **fields)
    calls = [ToolCall("c", "files__read", "{}"), ToolCall("d", "files__patch", '{"input": "+ x"}')]
    events = [
        *(Started(RECEIPT), Delta(0, reasoning="Let me see")),
        *(ToolCalled(0, call) for call in calls),
        *(Finished(0, "tool_calls"), Done(USAGE, RECEIPT)),
    ]
    frames = streamed(events, builder)
    answer = frames[-1]["response"]
    thought, read, patch = answer["output"]
    assert decode_reasoning(thought["encrypted_content"]) == "Let me see"
    assert (read["name"], read["namespace"], read["call_id"]) == ("read", "files", "c")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "+ x")
    custom = [frame["type"] for frame in frames if "custom_tool_call_input" in frame["type"]]
    assert [name.rpartition(".")[2] for name in custom] == ["delta", "done"]
    details = {"cached_tokens": 5, "cache_write_tokens": 15}
    assert answer["usage"]["input_tokens_details"] == details
    assert answer["keepwarm"]["ignored_tools"] == ["web_search"]
    assert answer["tools"] == [NAMESPACE, SEARCH]
    assert (answer["metadata"], answer["reasoning"]["effort"]) == ({"a": "b"}, "low")
    assert kept == [builder.response]


def test_response_that_fails_or_is_cancelled_is_not_kept_by_its_builder():
    for end in ("fail", "cancel"):
        kept = []
        builder = responses_builder(kept.append)
        streamed([Started(RECEIPT), Delta(0, text="Hel")], builder)
        getattr(builder, end)(*([Problem(500, "It failed.")] if end == "fail" else []))
        assert (kept, builder.response["output"][0]["status"]) == ([], "incomplete")


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Problem(429, "x", "rate_limit_exceeded"), "rate_limit_exceeded"),
        (Problem(504, "x", "timeout"), "server_error"),
        (Problem(400, "x"), "invalid_prompt"),
    ],
)
def test_failures_have_codes_that_clients_know(problem, code):
    """Also of a stream that had no event yet: the official client wants `created` before all."""
    stream = ResponseStream(responses_builder())
    created, failed = RESPONSES.events(stream.problem(problem).decode())
    assert (created["type"], created["response"]["error"]) == ("response.created", None)
    assert failed["response"]["error"]["code"] == code
    assert "response.created" not in stream.problem(problem).decode()


# By the official client


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


def ask(client, given=WORDS, **options):
    return client.responses.create(model="any", input=given, **{"max_output_tokens": 8, **options})


@pytest.mark.parametrize(
    ("options", "n_top"),
    [({"top_logprobs": 2}, 2), ({"include": ["message.output_text.logprobs"]}, 0)],
)
def test_logprobs_are_alike_whole_in_pieces_and_at_the_end_of_a_stream(client, options, n_top):
    (part,) = ask(client, **options).output[0].content
    assert part.logprobs
    assert all(each.logprob < 1e-4 for each in part.logprobs)
    assert {len(each.top_logprobs) for each in part.logprobs} == {n_top}
    events = list(ask(client, stream=True, **options))
    pieces = [e.logprobs for e in events if e.type == "response.output_text.delta"]
    (done,) = [e.logprobs for e in events if e.type == "response.output_text.done"]
    named = [each.token for each in part.logprobs]
    assert [each.token for each in done] == named
    assert [each.token for piece in pieces for each in piece] == named[: sum(map(len, pieces))]
    final = events[-1].response.output[0].content[0].logprobs
    assert [(each.token, each.logprob) for each in final] == [(e.token, e.logprob) for e in done]
    assert events[-1].response.top_logprobs == n_top
    assert ask(client).output[0].content[0].logprobs == []


def test_logprobs_of_a_message_are_not_those_of_the_thought_before_it(tmp_path):
    """Those of a chat completion, which has one list, are of all tokens."""
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    model = load(str(write_thoughtful(tmp_path / "model")), settings)
    asked = {"model": "x", "messages": [{"role": "user", "content": WORDS}], "logprobs": True}
    with serve(model, settings) as live, live.openai() as client:
        thought, said = ask(client, top_logprobs=1).output
        streamed = [e for e in ask(client, top_logprobs=1, stream=True) if e.type == DELTA]
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    assert (thought.content[0].text, said.content[0].text) == ("a", "b")
    for logprobs in (said.content[0].logprobs, *(event.logprobs for event in streamed)):
        assert [each.token for each in logprobs] == ["b"]
    pieces = [chunk.logprobs.content for chunk in chunks if chunk.logprobs]
    for logprobs in (whole.logprobs.content, [each for piece in pieces for each in piece]):
        assert [each.token for each in logprobs] == ["a", "</think>", "b"]


def test_function_in_a_namespace_is_called_by_both_names(client):
    weather = {"type": "function", "name": "weather", "parameters": {"const": {}}}
    namespace = {"type": "namespace", "name": "sky", "description": "Sky", "tools": [weather]}
    forced = {"tools": [namespace, SEARCH], "tool_choice": "required"}
    answer = ask(client, max_output_tokens=300, **forced)
    assert (answer.output[0].name, answer.output[0].namespace) == ("weather", "sky")
    assert answer.model_extra["keepwarm"]["ignored_tools"] == ["web_search"]


def test_answer_is_continued_by_its_id_or_by_those_of_its_items(client):
    first = ask(client, "One, two.")
    second = ask(client, "Three.", previous_response_id=first.id)
    said, asked = {"role": "user", "content": "One, two."}, {"role": "user", "content": "Three."}
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    named = {"id": first.output[0].id}
    for answer in (*first.output, {"type": "item_reference", **named}, named):
        assert ask(client, [said, answer, asked]).usage.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="role is required"):
        ask(client, [said, {**named, "output": "x"}, asked])
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, previous_response_id="resp_gone")
    assert error.value.body["type"] == "invalid_request_error"
    assert "'resp_gone'" in error.value.body["message"]


def test_conversation_of_another_server_is_refused_also_where_nothing_is_answered(client):
    for send in (client.responses.input_tokens.count, client.responses.compact):
        with pytest.raises(openai.BadRequestError, match="continue with previous_response_id"):
            send(model="x", input=WORDS, extra_body={"conversation": "conv_1"})


def test_input_items_are_listed_in_pages(client):
    said = [{"role": "user", "content": f"{number}"} for number in range(5)]
    listing = client.responses.input_items
    answer = ask(client, said)
    first = listing.list(answer.id, limit=2)
    assert [item.content[0].text for item in first.data] == ["4", "3"]
    assert first.has_more
    # OpenAI's client goes on.
    assert [item.content[0].text for item in first] == ["4", "3", "2", "1", "0"]
    in_order = listing.list(answer.id, order="asc")
    assert [item.content[0].text for item in in_order.data] == ["0", "1", "2", "3", "4"]
    assert not in_order.has_more
    with pytest.raises(openai.BadRequestError, match="no input item 'gone'"):
        listing.list(answer.id, after="gone")
    alike = ask(client, [{"id": "msg_1", **item} for item in said[:3]])
    assert not listing.list(alike.id, limit=1, after="msg_1").has_more, "pages come to an end"


def test_input_items_are_of_the_published_types_in_whichever_form_they_were_sent(client):
    text = {"type": "input_text", "text": "Two."}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "An oak."}
    sent = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text, "Three."]},
        *(call, result),
        {"type": "web_search_call", "id": "ws_1", "status": "failed", "action": {"type": "x"}},
    ]
    answer = ask(client, sent)
    page = client.responses.input_items.with_raw_response.list(answer.id, order="asc")
    *listed, unread = page.http_response.json()["data"]
    assert unread == sent[-1]
    for item in listed:
        TypeAdapter(ResponseItem).validate_python(item, strict=True)
    assert [part["text"] for item in listed[:3] for part in item["content"]] == [
        *("One.", "Yes.", "Two.", "Three.")
    ]


def test_answer_is_shown_streamed_or_not_and_deleted(client):
    *_, last = ask(client, stream=True)
    assert client.responses.retrieve(last.response.id).output == last.response.output
    answer = ask(client)
    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()
    items = client.responses.input_items.list(answer.id)
    assert [item.content[0].text for item in items.data] == [WORDS]
    assert items.first_id == items.last_id == items.data[0].id
    again = [{"type": "item_reference", "id": items.first_id}]
    assert ask(client, again).usage.input_tokens == answer.usage.input_tokens
    client.responses.delete(answer.id)
    unstored = ask(client, store=False)
    assert unstored.model_extra["store"] is False
    for gone in (answer, unstored):
        with pytest.raises(openai.NotFoundError, match="not found; send the whole"):
            client.responses.retrieve(gone.id)


def test_stream_of_one_turn_over_the_context_fails_with_the_event_that_codex_knows(client):
    """Codex compacts at this event and its code, and gives up at a status of 400."""
    made = list(ask(client, "9" * (N_CONTEXT + 1), stream=True, truncation="auto"))
    assert [event.type for event in made] == ["response.created", "response.failed"]
    failed = made[-1].response
    assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
    assert f"maximum context length is {N_CONTEXT} tokens" in failed.error.message

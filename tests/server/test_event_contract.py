"""One contract for all APIs: what the events of an answer become, streamed and as a whole."""

import json

import pytest

from keepwarm.engine.answer import collect
from keepwarm.server.anthropic.routes import CachedPrefix, MessageMeta, MessageStream, message
from keepwarm.server.http.problems import Problem
from keepwarm.server.http.sse import receipt_dict
from keepwarm.server.ollama.routes import AnswerLines, AnswerMeta, chat_part
from keepwarm.server.ollama.routes import whole as ollama_whole
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.responses.events import (
    ResponseBuilder,
    ResponseStream,
    initial_response,
    replay,
)
from keepwarm.server.responses.routes import options_of
from keepwarm.text.request import (
    Delta,
    Done,
    Finished,
    Progress,
    Receipt,
    Started,
    ToolCall,
    ToolCallDelta,
    ToolCalled,
    Usage,
)
from keepwarm.text.sampling_rules import DrawRules
from tests.server.apis import (
    APIS,
    CHAT,
    FORCING,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    SETTINGS,
    TALKING,
    TEXT,
    adapter,
    events_of,
    named_events,
)

EVERY = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
RECEIPT = Receipt(20, {"live": 2, "disk": 3}, 15, 1.0, scrubbed=("budget",))
USAGE = Usage(20, 5, 8, 3, 500.0, 20.0)
META = CompletionMeta("chatcmpl-1", 1700000000, "tiny")
MESSAGE_META = MessageMeta("msg_1", "tiny", [CachedPrefix(12, 300.0)], ["web_search"])
LINES_META = AnswerMeta("tiny", chat_part)
CALL = ToolCall("call_1", "read", '{"path": "ä"}')
OTHER = CALL._replace(id="call_2")
TEXTS = [
    *(Started(RECEIPT), Progress(10, 20), Delta(0, reasoning="Let "), Delta(0, reasoning="me see")),
    *(Delta(0, text="Hel"), Delta(0, text=""), Delta(0, text="lo")),
]
END = Done(USAGE, RECEIPT)
ANSWER = [*TEXTS, ToolCalled(0, CALL), ToolCalled(0, OTHER), Finished(0, "tool_calls"), END]
PIECES = [  # the same call, as it is generated
    *(*TEXTS, ToolCallDelta(0, "call_1", "read", ""), ToolCallDelta(0, "call_1", "read", '{"pa')),
    *(ToolCallDelta(0, "call_1", "read", 'th": "ä"}'), ToolCalled(0, CALL)),
    *(ToolCalled(0, OTHER), Finished(0, "tool_calls"), END),
]
BROKEN = ToolCallDelta(0, "f:0", "f", '{"a"')


def responses_builder(keep=lambda _: None, **fields):
    body = RESPONSES.shape.model_validate(RESPONSES.least | fields)
    request = RESPONSES.request_of(body, SETTINGS)
    response = initial_response(body, "tiny", request, DrawRules())
    return ResponseBuilder(response, options_of(body, request), keep)


ENCODERS = {
    CHAT: lambda: chat.ChatStream(META, 1, True, None),
    TEXT: lambda: completions.TextStream(META, [""], True, None),
    MESSAGES: lambda: MessageStream(MESSAGE_META),
    RESPONSES: lambda: ResponseStream(responses_builder()),
    OLLAMA: lambda: AnswerLines(LINES_META),
}


def responses_whole(events):
    builder = responses_builder()
    for event in events:
        builder.add_whole(event)
    return builder.response


WHOLE = {
    CHAT: lambda events: chat.completion(META, collect(events), None),
    TEXT: lambda events: completions.completion(META, collect(events), [""], None),
    MESSAGES: lambda events: message(MESSAGE_META, collect(events)),
    RESPONSES: responses_whole,
    OLLAMA: lambda events: ollama_whole(LINES_META, collect(events)),
}


def encoded(api, events):
    encoder = ENCODERS[api]()
    return b"".join(encoder.event(event) for event in events).decode()


@EVERY
@pytest.mark.parametrize("events", [ANSWER, PIECES], ids=["whole calls", "pieces"])
def test_stream_amounts_to_the_whole_answer_and_says_all_of_it(api, events):
    whole = json.loads(json.dumps(WHOLE[api](events)))
    api.answer.model_validate(whole)
    read = api.read(whole)
    assert read == api.read(api.whole(encoded(api, events)))
    if api is TEXT:  # prompts without a template, whose answers have no other events
        assert (read.text, read.is_cut) == ("Hello", False)
    else:
        assert (read.text, read.reasoning, read.is_cut) == ("Hello", "Let me see", False)
        assert read.calls == [(each.id, "read", {"path": "ä"}) for each in (CALL, OTHER)]
    assert (read.n_prompt, read.n_cached, read.n_output) == (20, None if api is OLLAMA else 5, 8)
    ignored = {"ignored_tools": ["web_search"]} if api is MESSAGES else {}
    assert read.receipt == json.loads(json.dumps(receipt_dict(RECEIPT))) | ignored


def kinds_of(api, stream):
    """The kinds of its events, with the block or item that each is about."""
    match api:
        case _ if api is CHAT:
            deltas = [choice["delta"] for each in api.events(stream) for choice in each["choices"]]
            return [(*(name for name in delta if name != "role"),) for delta in deltas]
        case _ if api is MESSAGES:
            return [(each["type"], each.get("index")) for each in api.events(stream)]
    names = [each["type"].removeprefix("response.") for each in api.events(stream)]
    return list(zip(names, [e.get("output_index") for e in api.events(stream)], strict=True))


def block(index, n_pieces):
    pieces = [("content_block_delta", index)] * n_pieces
    return [("content_block_start", index), *pieces, ("content_block_stop", index)]


def item(index, kind, n_pieces=1, parts=("content_part.added", "content_part.done")):
    pieces = [f"{kind}.delta"] * n_pieces
    first, last = parts[:1], parts[1:]
    names = ["output_item.added", *first, *pieces, f"{kind}.done", *last, "output_item.done"]
    return [(name, index) for name in names]


ARGUMENTS = "function_call_arguments"
SEQUENCES = {
    CHAT: [
        *(("content",), *[("reasoning_content", "reasoning")] * 2, *[("content",)] * 2),
        *(*[("tool_calls",)] * 4, ()),
    ],
    MESSAGES: [
        *(("message_start", None), *block(0, 3), *block(1, 2), *block(2, 1), *block(3, 1)),
        *(("message_delta", None), ("message_stop", None)),
    ],
    RESPONSES: [
        *(("created", None), ("in_progress", None)),
        *(*item(0, "reasoning_text", 2), *item(1, "output_text", 2)),
        *(*item(2, ARGUMENTS, parts=()), *item(3, ARGUMENTS, parts=()), ("completed", None)),
    ],
}


@pytest.mark.parametrize("api", SEQUENCES, ids=lambda api: api.name)
def test_events_come_in_the_order_that_clients_expect(api):
    assert kinds_of(api, encoded(api, ANSWER)) == SEQUENCES[api]


REASONS = {  # by stop, length, tool_calls
    CHAT: ("stop", "length", "tool_calls"),
    TEXT: ("stop", "length", "stop"),
    MESSAGES: ("end_turn", "max_tokens", "tool_use"),
    RESPONSES: ("completed", "incomplete", "completed"),
    OLLAMA: ("stop", "length", "stop"),
}


def reason_of(answer):
    named = answer["choices"][0] if "choices" in answer else answer
    keys = ("finish_reason", "stop_reason", "done_reason", "status")
    return next(named[key] for key in keys if key in named)


@EVERY
@pytest.mark.parametrize("number", range(3), ids=["stop", "length", "tool_calls"])
def test_reason_of_the_end_is_in_the_words_of_the_api(api, number):
    reason = ("stop", "length", "tool_calls")[number]
    calls = [ToolCalled(0, CALL)] if reason == "tool_calls" else []
    events = [Started(RECEIPT), Delta(0, text="Hel"), *calls, Finished(0, reason), END]
    answers = WHOLE[api](events), api.whole(encoded(api, events))
    assert [reason_of(answer) for answer in answers] == [REASONS[api][number]] * 2
    assert [api.read(answer).is_cut for answer in answers] == [reason == "length"] * 2
    if api is RESPONSES and reason == "length":
        assert answers[1]["output"][0]["status"] == "incomplete"


def test_times_of_ollama_are_those_of_the_usage():
    for answer in (WHOLE[OLLAMA](ANSWER), OLLAMA.whole(encoded(OLLAMA, ANSWER))):
        assert answer["prompt_eval_duration"] == 500_000_000
        assert answer["eval_duration"] == 400_000_000  # eight tokens, twenty a second
        assert min(answer["total_duration"], answer["load_duration"]) >= 1  # clients divide by it


def test_stop_sequence_of_messages_is_named():
    events = [Started(RECEIPT), Finished(0, "stop", "END"), END]
    for answer in (WHOLE[MESSAGES](events), MESSAGES.whole(encoded(MESSAGES, events))):
        found = (answer["stop_reason"], answer["stop_sequence"], answer["content"])
        assert found == ("stop_sequence", "END", [])


def test_call_that_a_stop_sequence_ends_is_to_be_made():
    """The official client runs a tool only for this reason."""
    events = [Started(RECEIPT), ToolCalled(0, CALL), Finished(0, "tool_calls", "END"), END]
    for answer in (WHOLE[MESSAGES](events), MESSAGES.whole(encoded(MESSAGES, events))):
        assert (answer["stop_reason"], len(answer["content"])) == ("tool_use", 1)
        assert answer["stop_sequence"] is None


@pytest.mark.parametrize("api", FORCING, ids=lambda api: api.name)
def test_call_id_may_come_again_after_its_call_was_malformed(api):
    events = [Started(RECEIPT), BROKEN, Delta(0, text="<broken"), BROKEN]
    whole = [ToolCallDelta(0, "f:0", "f", ": 1}"), ToolCalled(0, ToolCall("f:0", "f", '{"a": 1}'))]
    stream = encoded(api, [*events, *whole, Finished(0, "tool_calls"), END])
    read = api.read(api.whole(stream))
    assert (read.text, read.calls) == ("<broken", [("f:0", "f", {"a": 1})])
    begun = [line for line in stream.splitlines() if '"f:0"' in line and "data: " in line]
    assert len(begun) >= 2


def test_calls_of_a_response_that_end_together_are_closed_in_order():
    begun = [BROKEN, ToolCallDelta(0, "f:0", "f", ": 1}"), ToolCallDelta(0, "f:1", "f", "{}")]
    ended = [ToolCalled(0, ToolCall(f"f:{n}", "f", "{}")) for n in range(2)]
    stream = encoded(RESPONSES, [Started(RECEIPT), *begun, *ended, Finished(0, "tool_calls"), END])
    kinds = kinds_of(RESPONSES, stream)[2:-1]
    assert kinds == [*item(0, ARGUMENTS, 2, ()), *item(1, ARGUMENTS, parts=())]
    output = RESPONSES.whole(stream)["output"]
    assert [(each["call_id"], each["status"]) for each in output] == [
        ("f:0", "completed"),
        ("f:1", "completed"),
    ]


# Streams that wait, and streams that fail


ALIVE = {  # what a stream says before and after the plan while nothing else is to say
    MESSAGES: {"type": "ping", "keepwarm": {"prompt_tokens_done": 5, "prompt_tokens": 20}},
    RESPONSES: {"keepwarm": {"prompt_tokens_done": 5, "prompt_tokens": 20}, "sequence_number": 2},
    OLLAMA: {"message": {"role": "assistant", "content": ""}, "done": False},
}


@EVERY
def test_stream_that_waits_says_how_far_it_is_in_a_form_that_clients_skip(api):
    encoder = ENCODERS[api]()
    encoder.event(Started(RECEIPT))
    alive = encoder.keep_alive(Progress(5, 20)).decode()
    if api in (CHAT, TEXT):
        assert alive == ': {"prompt_tokens_done":5,"prompt_tokens":20}\n\n'
        assert encoder.keep_alive(None) == b": {}\n\n"
    else:
        (event,) = events_of(alive)
        assert event.items() >= ALIVE[api].items()


@EVERY
def test_nothing_that_is_said_ends_a_line_of_a_stream(api):
    """Clients that read through httpx take these characters for the end of one."""
    odd = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1ee\rf\n"
    stream = encoded(api, [Started(RECEIPT), Delta(0, text=odd), Finished(0, "stop"), END])
    assert stream.splitlines() == stream.split("\n")[:-1]
    assert api.read(api.whole(stream)).text == odd


@EVERY
def test_stream_that_fails_ends_with_the_error_behind_what_was_said(api):
    encoder = ENCODERS[api]()
    said = b"".join(map(encoder.event, [Started(RECEIPT), Delta(0, text="Hel")]))
    stream = (said + encoder.problem(Problem(503, "Stopping."))).decode()
    assert api.failed(stream) == "Stopping."
    assert "Hel" in stream
    if api is MESSAGES:
        assert events_of(stream)[-1]["error"]["type"] == "overloaded_error"
    if api is RESPONSES:
        failed = api.events(stream)[-1]["response"]
        assert (failed["error"]["code"], failed["completed_at"]) == ("server_error", None)
        assert failed["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize("api", TALKING, ids=lambda api: api.name)
def test_thought_without_an_answer_is_the_whole_answer(api):
    events = [Started(RECEIPT), Delta(0, reasoning="Hm."), Finished(0, "length"), END]
    for answer in (WHOLE[api](events), api.whole(encoded(api, events))):
        read = api.read(answer)
        assert (read.text, read.reasoning, read.is_cut) == ("", "Hm.", True)


def test_stored_response_is_replayed_with_the_events_of_its_stream():
    stream = RESPONSES.events(encoded(RESPONSES, ANSWER))
    response = stream[-1]["response"]
    events = named_events(replay(response, -1).decode())
    for event in events:
        adapter(RESPONSES.event).validate_python(event)
    *numbers, last = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(numbers)))
    assert last >= stream[-1]["sequence_number"] > len(numbers), "a client has seen lower ones"
    kinds = [event["type"] for event in stream]
    texts_in_one = [
        kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before
    ]
    assert [event["type"] for event in events] == texts_in_one
    assert json.loads(json.dumps(events[-1]["response"])) == response
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]

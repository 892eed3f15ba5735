"""One contract for all APIs: whole answers, streams, tools, stops, wrong bodies, limits, keys."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.kit.waiting import wait_until
from tests.server.apis import (
    APIS,
    CHAT,
    FORCING,
    MESSAGES,
    OLLAMA,
    PLACES,
    RESPONSES,
    SCHEMA,
    STOPPING,
    TEXT,
    headers,
)
from tests.server.conftest import N_CONTEXT, read_vocabulary

ASK = "What is the answer to the question?"
LONG_TEXT = {"type": "string", "minLength": 9000}
ENDLESS = {"n_tokens": 9000, "schema": LONG_TEXT}
EVERY = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
RATE, MAX_BODY = 1, 40_000


def ask(live, api, text=ASK, *arguments, key="", **fields):
    """A whole answer, checked by the types of the official client."""
    answer = send(live, api, api.body(text, *arguments, **fields), key)
    assert answer.status_code == 200, answer.text
    api.answer.model_validate(answer.json())
    return answer


def send(live, api, body, key=""):
    return live.post(api.path, body, **(headers(key) if key else {}))


def stream(live, api, text=ASK, *arguments, **fields):
    return send(live, api, api.body(text, *arguments, stream=True, **fields))


@EVERY
def test_whole_answer_counts_its_tokens_and_names_the_model(live, api):
    answer = ask(live, api).json()
    read = api.read(answer)
    assert answer["model"] == "tiny"
    assert 1 <= read.n_output <= 8
    assert read.receipt["prompt_tokens"] == read.n_prompt > 5
    one = api.read(ask(live, api, ASK, 1).json())
    assert (one.n_output, one.is_cut) == (1, True)


@EVERY
def test_same_prompt_again_is_warm_and_the_receipt_is_in_header_and_body(live, api):
    text = f"How warm is the dog under the tree of {api.name}? " * 20
    first, second = ask(live, api, text), ask(live, api, text)
    before, now = api.read(first.json()), api.read(second.json())
    assert now.text == before.text
    assert json.loads(second.headers["x-keepwarm-receipt"]) == now.receipt
    assert (now.receipt["recomputed"], now.receipt["exact"]) == (1, True)
    assert sum(now.receipt["reused"].values()) == now.n_prompt - 1
    assert now.n_cached in (None, now.n_prompt - 1)


@EVERY
def test_stream_equals_the_whole_answer(live, api):
    api.read(ask(live, api).json())  # from here on both are warm
    whole = api.read(ask(live, api).json())
    answer = stream(live, api)
    assert answer.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson"))
    assert json.loads(answer.headers["x-keepwarm-receipt"])["prompt_tokens"] == whole.n_prompt
    streamed = api.read(api.whole(answer.text))
    times = {"saved_ms": 0}
    assert streamed._replace(receipt=streamed.receipt | times) == whole._replace(
        receipt=whole.receipt | times
    )


@pytest.mark.parametrize("api", STOPPING, ids=lambda api: api.name)
def test_stop_string_ends_the_answer_before_it(live, api):
    text = api.read(ask(live, api, ASK, 24).json()).text
    stop = text[len(text) // 2 :][:3]
    fields = {"stop": [stop, "never said"]}
    whole = api.read(ask(live, api, ASK, 24, **fields).json())
    assert (whole.text, whole.is_cut) == (text[: text.index(stop)], False)
    streamed = api.read(api.whole(stream(live, api, ASK, 24, **fields).text))
    assert (streamed.text, streamed.is_cut) == (whole.text, False)


@pytest.mark.parametrize("api", FORCING, ids=lambda api: api.name)
def test_forced_tool_is_called_and_its_result_is_read_behind_what_is_warm(live, api):
    answer = ask(live, api, ASK, 200, tool=True).json()
    first = api.read(answer)
    ((_, name, arguments),) = first.calls
    assert (name, arguments["place"] in PLACES) == ("weather", True)
    streamed = api.read(api.whole(stream(live, api, ASK, 200, tool=True).text))
    assert [call[1:] for call in streamed.calls] == [(name, arguments)]
    body = api.follow_up(ASK, answer, "It rains.")
    second = send(live, api, body)
    assert second.status_code == 200, second.text
    assert api.read(second.json()).n_cached >= first.n_prompt - 1


@EVERY
def test_answer_follows_a_schema(live, api):
    read = api.read(ask(live, api, ASK, 500, schema=SCHEMA).json())
    assert json.loads(read.text)["place"] in PLACES


@EVERY
def test_no_tokens_are_an_empty_answer_with_usage(live, api):
    """Anthropic's way to fill the cache."""
    for answer in (ask(live, api, ASK, 0).json(), api.whole(stream(live, api, ASK, 0).text)):
        read = api.read(answer)
        assert (read.text, read.is_cut, read.n_output) == ("", True, 0)
        assert read.n_prompt > 5


@EVERY
def test_cache_policy_of_a_header_or_the_body_holds(live, api):
    text = f"Keep this question to yourself, will you, {api.name}?"
    for _ in range(2):
        answer = live.post(api.path, api.body(text), **{"X-Keepwarm-Cache": "no-store"})
        assert api.read(answer.json()).receipt["reused"] == {}
    explained = ask(live, api, text, keepwarm={"explain": True})
    assert api.read(explained.json()).receipt["miss"]["reason"] in ("new", "diverged")
    wrong = live.post(api.path, api.body(text), **{"X-Keepwarm-Cache": "often"})
    assert (wrong.status_code, "cache policy" in api.problem(wrong.json()).message) == (400, True)


NAMES = {  # of the fields and headers by which a client names its conversation
    CHAT: [{"prompt_cache_key": "$"}, {"keepwarm": {"agent": "$"}}],
    TEXT: [{"prompt_cache_key": "$"}],
    MESSAGES: [
        {"metadata": {"user_id": '{"device_id": "d", "session_id": "$"}'}},
        {"keepwarm": {"agent": "$"}},
    ],
    RESPONSES: [{"prompt_cache_key": "$"}, {"keepwarm": {"agent": "$"}}],
    OLLAMA: [{"keepwarm": {"agent": "$"}}],
}


@EVERY
def test_agent_is_known_by_header_and_by_the_fields_of_the_api(live, api):
    agents = live.host.engine.store.on_disk.agents
    for header in ("X-Keepwarm-Agent", "X-Claude-Code-Session-Id", "session-id", "x-session-id"):
        name = f"{api.name}-{header.lower()}"
        assert live.post(api.path, api.body(ASK), **{header: name}).status_code == 200
        wait_until(lambda name=name: name in {agent.id for agent in agents.all()})
    for number, fields in enumerate(NAMES[api]):
        name = f"{api.name}-{number}"
        named = json.loads(json.dumps(fields).replace("$", name))
        ask(live, api, **named)
        wait_until(lambda name=name: name in {agent.id for agent in agents.all()})


# Wrong bodies


ROBOT = [{"role": "robot", "content": "x"}]
WRONG = {  # a field that the shape refuses, one that the adapter does, and what only a server finds
    CHAT: [
        ({"messages": ROBOT}, "messages[0].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"keepwarm": {"agent": "../x"}}, "agent id"),
    ],
    TEXT: [
        ({"prompt": []}, "prompt"),
        ({"best_of": 4}, "best_of"),
        ({"suffix": "!"}, "suffix"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, -5]}, "token"),
        ({"prompt": [1, 10**9]}, "token"),
    ],
    MESSAGES: [
        ({"messages": ROBOT}, "messages[0].role"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
    RESPONSES: [
        ({"input": ROBOT}, "input[0].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "omit store"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "instructions"),
        ({"input": [{"type": "item_reference", "id": "msg_gone"}]}, "msg_gone"),
    ],
    OLLAMA: [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ({"think": True}, "does not support thinking"),
        ({"options": {"temperature": 1e300}}, "temperature"),
        ({"options": {"num_predict": 1 << 70}}, "64 bits"),
        ({"keep_alive": "soon"}, "keep_alive"),
    ],
}


@pytest.mark.parametrize(
    ("api", "fields", "named"),
    [(api, *case) for api, cases in WRONG.items() for case in cases],
    ids=lambda value: getattr(value, "name", None),
)
def test_wrong_field_is_named_in_the_errors_of_the_api(live, api, fields, named):
    answer = send(live, api, api.body(ASK) | fields)
    assert answer.status_code == 400, answer.text
    problem = api.problem(answer.json())
    assert problem.kind in (None, "invalid_request_error")
    assert named in problem.message
    if api in (CHAT, RESPONSES) and named[0].islower() and " " not in named:
        assert answer.json()["error"]["param"] is not None


NOT_JSON = [
    *(b"", b"{", b"null", b"[1]", b'"x"', b"\xff\xfe{", b'{"input": "\xff"}'),
    *(b'{"messages": [', b"[" * 10_000),
]
NOT_VALID = [
    b'{"x": "\\ud800"',
    b'{"x": ["\\ud800", [[[1]]]]',
    b'{"x": NaN',
    b'{"x": 1e400',
    b'{"x": ' + b"[" * 5000 + b"]" * 5000,
]


@EVERY
def test_body_that_is_not_json_is_refused_in_the_errors_of_the_api(live, api):
    body = json.dumps(api.body(ASK)).encode()
    for wrong in (*NOT_JSON, *(each + b", " + body[1:] for each in NOT_VALID)):
        answer = live.post(api.path, wrong)
        assert answer.status_code == 400, (wrong, answer.text)
        assert api.problem(answer.json()).message
    large = api.body(ASK) | {"x": [[1] * 100] * 10_000}
    refused = send(live, api, large)
    assert (refused.status_code, bool(api.problem(refused.json()))) == (413, True)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_odd_values_of_a_chat_are_answered_or_refused(live, is_stream):
    """None is the server's failure."""
    nonsense = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}
    function = {"name": "a", "parameters": {"type": 5}}
    for fields in (
        {"logit_bias": {"99999999": 1}},
        {"response_format": nonsense},
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 2},
    ):
        answer = send(live, CHAT, CHAT.body(ASK, 2, stream=is_stream) | fields)
        assert answer.status_code in (200, 400), answer.text


OVER = {
    CHAT: f"maximum context length is {N_CONTEXT - 1} tokens",
    TEXT: f"maximum context length is {N_CONTEXT - 1} tokens",
    MESSAGES: f"tokens > {N_CONTEXT - 1} maximum",
    RESPONSES: f"maximum context length is {N_CONTEXT - 1} tokens",
    OLLAMA: "the input length exceeds the context length",
}


@EVERY
def test_prompt_over_the_context_is_refused_in_words_that_clients_know(live, api):
    """Very long ones are not even tokenised; Codex knows only the event of a stream."""
    for n_letters in (N_CONTEXT + 1, 70_000):
        whole = send(live, api, api.body("9" * n_letters))
        assert whole.status_code == 400
        assert OVER[api] in api.problem(whole.json()).message
        if api in (CHAT, TEXT, RESPONSES):
            assert whole.json()["error"]["code"] == "context_length_exceeded"
        streamed = stream(live, api, "9" * n_letters)
        if api is RESPONSES:
            assert streamed.status_code == 200
            assert OVER[api] in api.failed(streamed.text)
        else:
            assert streamed.status_code == 400
            assert OVER[api] in api.problem(streamed.json()).message


# Clients that leave, limits, keys


def is_idle(live):
    stats = live.host.engine.stats()
    return not (stats.waiting or stats.prefilling or stats.decoding)


@EVERY
def test_client_that_leaves_frees_the_engine(live, api):
    read_vocabulary(live, LONG_TEXT)
    for is_stream in (True, False):
        body = api.body(ASK, **ENDLESS, stream=is_stream)
        with httpx.Client(base_url=live.url, verify=False) as client:
            if is_stream:
                with client.stream("POST", api.path, json=body, timeout=300) as answer:
                    assert next(answer.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(api.path, json=body, timeout=0.3)
        wait_until(lambda: is_idle(live), 60)
    again = ask(live, api, **ENDLESS | {"n_tokens": 1})  # what was read of the prompt is kept
    assert api.read(again.json()).receipt["recomputed"] == 1


@EVERY
def test_many_streams_at_once_answer_as_alone(live, api):
    questions = [f"Question {number} of the user of {api.name}?" for number in range(4)]
    alone = [api.read(ask(live, api, question).json()).text for question in questions]
    with ThreadPoolExecutor(4) as threads:
        streams = threads.map(lambda question: stream(live, api, question), questions)
        assert [api.read(api.whole(answer.text)).text for answer in streams] == alone


@pytest.fixture(scope="module")
def keyed(serving):
    with serving(api_keys="one,two") as live:
        yield live


@EVERY
def test_key_is_a_tenant_and_a_wrong_one_is_refused(keyed, api):
    text = f"{api.name}: whose question is this? " * 20
    for refused in (send(keyed, api, api.body(text)), send(keyed, api, api.body(text), "three")):
        assert refused.status_code == 401
        assert api.problem(refused.json()).kind in (
            *(None, "authentication_error", "invalid_request_error"),
        )
    elsewhere = {"Origin": "https://elsewhere.example", **headers("one")}
    assert keyed.post(api.path, api.body(text), **elsewhere).status_code == 403
    reused = [
        sum(api.read(ask(keyed, api, text, key=key).json()).receipt["reused"].values())
        for key in ("one", "two", "one")
    ]
    assert max(reused[:2]) < 16 < reused[2]  # the template's first tokens, of the API before


@EVERY
def test_request_over_a_limit_says_when_to_come_back(serving, api):
    with serving(rate_per_minute=RATE, max_body_bytes=MAX_BODY) as live:
        large = send(live, api, api.body("x" * MAX_BODY))
        assert (large.status_code, bool(api.problem(large.json()).message)) == (413, True)
        limited = send(live, api, api.body(ASK))
        assert limited.status_code == 429
        assert int(limited.headers["retry-after"]) >= 1
        assert api.problem(limited.json()).kind != "invalid_request_error"


@pytest.fixture(scope="module")
def hasty(serving):
    with serving(request_timeout_s=1.0) as live:
        read_vocabulary(live, LONG_TEXT)
        yield live


@EVERY
def test_deadline_is_a_status_or_the_last_words_of_a_stream(hasty, api):
    whole = send(hasty, api, api.body(ASK, **ENDLESS))
    assert whole.status_code == 504
    assert int(whole.headers["retry-after"]) >= 1
    assert "within 1 seconds" in api.problem(whole.json()).message
    streamed = stream(hasty, api, **ENDLESS)
    assert streamed.status_code == 200
    assert "within 1 seconds" in api.failed(streamed.text)


def test_unknown_paths_and_methods_have_the_errors_of_their_api(live):
    assert live.get("/v1/nothing").status_code == 404
    for api in APIS:
        wrong = live.get(api.path)
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert "does not support GET" in api.problem(wrong.json()).message
    assert live.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert "no endpoint" in live.post("/api/push", {}).json()["error"]


COUNTS = {MESSAGES: "/v1/messages/count_tokens", RESPONSES: "/v1/responses/input_tokens"}


@pytest.mark.parametrize("api", COUNTS, ids=lambda api: api.name)
def test_counted_tokens_are_those_of_the_answer(live, api):
    changes = [{}, {"tool": True}]
    if api is MESSAGES:
        billing = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
        late = [{"role": "user", "content": ASK}, {"role": "system", "content": "Linux"}]
        changes += [{"system": "Be kind."}, {"system": billing}, {"messages": late}]
    else:
        changes += [{"instructions": "Be kind."}]
    for fields in changes:
        body = api.body(ASK, 200, **fields)
        counted = live.post(COUNTS[api], body).json()["input_tokens"]
        assert counted == api.read(send(live, api, body).json()).n_prompt

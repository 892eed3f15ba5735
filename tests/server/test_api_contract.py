"""One contract for all APIs: whole answers, streams, tools, stops, wrong bodies, limits, keys."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from keepwarm import config
from keepwarm.models.load import load
from keepwarm.server.models.host import EngineHost
from tests.kit.checkpoints import THINKING_CHATML, make_tokenizer, write_checkpoint
from tests.kit.scripted import call, write_endless, write_scripted
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
    TALKING,
    TEXT,
    headers,
)
from tests.server.conftest import N_CONTEXT, read_vocabulary, serve

ASK = "What is the answer to the question?"
LONG_TEXT = {"type": "string", "minLength": 9000}
ENDLESS = {"n_tokens": 9000, "schema": LONG_TEXT}
EVERY, TALKERS, CALLERS = (
    pytest.mark.parametrize("api", apis, ids=lambda api: api.name)
    for apis in (APIS, TALKING, FORCING)
)
RATE, MAX_BODY = 1, 40_000
TIMEOUT_S = 0.5


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
    answer = ask(live, api)
    read = api.read(answer.json())
    assert answer.json()["model"] == "tiny"
    assert answer.headers["x-request-id"] == answer.headers["request-id"]  # Anthropic's name
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


@EVERY
def test_stream_has_no_spaces_between_its_json(live, api):
    sent = stream(live, api).text
    assert '":"' in sent
    assert not re.search(r'"[:,] ', sent)


@pytest.mark.parametrize("api", STOPPING, ids=lambda api: api.name)
def test_stop_string_ends_the_answer_before_it(live, api):
    text = api.read(ask(live, api, ASK, 24).json()).text
    stop = text[len(text) // 2 :][:3]
    fields = {"stop": [stop, "never said"]}
    whole = api.read(ask(live, api, ASK, 24, **fields).json())
    assert (whole.text, whole.is_cut) == (text[: text.index(stop)], False)
    streamed = api.read(api.whole(stream(live, api, ASK, 24, **fields).text))
    assert (streamed.text, streamed.is_cut) == (whole.text, False)


@CALLERS
def test_forced_tool_is_called_and_its_result_is_read_behind_what_is_warm(live, api):
    answer = ask(live, api, ASK, 200, tool="forced").json()
    first = api.read(answer)
    ((_, name, arguments),) = first.calls
    assert (name, arguments["place"] in PLACES) == ("weather", True)
    streamed = stream(live, api, ASK, 200, tool="forced").text
    assert [call[1:] for call in api.read(api.whole(streamed)).calls] == [(name, arguments)]
    assert len(api.events(streamed)) > 10  # the arguments come as they are generated
    body = api.follow_up(ASK, answer, "It rains.")
    second = send(live, api, body)
    assert second.status_code == 200, second.text
    assert api.read(second.json()).n_cached >= first.n_prompt - 1


@CALLERS
def test_forced_call_that_is_cut_off_is_no_text_beside_what_was_sent_of_it(live, api):
    n_tokens = api.read(ask(live, api, ASK, 200, tool="forced").json()).n_output - 20
    whole = api.read(ask(live, api, ASK, n_tokens, tool="forced").json())
    sent = stream(live, api, ASK, n_tokens, tool="forced").text
    read = api.read(api.whole(sent))
    for answer in (whole, read):
        assert (answer.text, answer.is_cut, answer.calls) == ("", True, [])
    assert '"weather"' in sent


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A server whose model answers with two calls, and with words once their results are there."""
    home = tmp_path_factory.mktemp("calls")
    both = "\n".join(call("weather", place=place) for place in PLACES)
    settings = config.load({"KEEPWARM_HOME": str(home)})
    path = write_scripted(home / "model", [both, "It rains."])
    with serve(load(str(path), settings), settings) as live:
        yield live


@TALKERS
def test_two_calls_of_one_answer_and_their_results_go_back(scripted, api):
    answer = ask(scripted, api, ASK, 100, tool="offered").json()
    whole = api.read(answer)
    streamed = api.read(api.whole(stream(scripted, api, ASK, 100, tool="offered").text))
    for read in (whole, streamed):
        assert [made[1:] for made in read.calls] == [
            ("weather", {"place": place}) for place in PLACES
        ]
        assert len({made[0] for made in read.calls}) == 2
    after = send(scripted, api, api.follow_up(ASK, answer, "Rain."))
    assert api.read(after.json()).text == "It rains."


@pytest.fixture(scope="module")
def beginner(tmp_path_factory):
    """A server whose model begins a call, and then JSON; it ends neither."""
    home = tmp_path_factory.mktemp("beginner")
    settings = config.load({"KEEPWARM_HOME": str(home)})
    path = write_scripted(home / "model", ["<tool_call", '{"place'])
    with serve(load(str(path), settings), settings) as live:
        yield live


@TALKERS
def test_beside_a_format_tools_are_called_and_then_the_format_holds(beginner, api):
    asks = {"tool": "one", "schema": SCHEMA}
    answer = ask(beginner, api, ASK, 100, **asks).json()
    streamed = api.read(api.whole(stream(beginner, api, ASK, 100, **asks).text))
    for read in (api.read(answer), streamed):
        _, name, arguments = read.calls[0]
        assert (name, arguments["place"] in PLACES) == ("weather", True)
    cut = api.read(ask(beginner, api, ASK, 12, **asks).json())
    assert (cut.text, cut.calls, cut.is_cut) == ("", [], True)  # part of a call is no JSON
    said = api.follow_up(ASK, answer, "Rain.")
    talk = {name: said[name] for name in ("messages", "input") if name in said}
    last = api.read(send(beginner, api, api.body(ASK, 100, **asks) | talk).json())
    assert last.calls == []
    assert json.loads(last.text)["place"] in PLACES


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    """A server whose model says a little and begins a call, which it does not go on with."""
    home = tmp_path_factory.mktemp("careless")
    settings = config.load({"KEEPWARM_HOME": str(home)})
    path = write_scripted(home / "model", ["Well: <tool_call>"])
    with serve(load(str(path), settings), settings) as live:
        yield live


@CALLERS
@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_tool_is_called_by_its_schema(careless, api, strict):
    body = api.body(ASK, 100, tool="one")
    for tool in body["tools"]:
        tool.get("function", tool)["strict"] = strict
    read = api.read(send(careless, api, body).json())
    assert "ignored_fields" not in read.receipt
    if strict:
        ((_, name, arguments),) = read.calls
        assert (name, arguments["place"] in PLACES) == ("weather", True)
        assert read.text.strip() == "Well:"
    else:
        assert (read.calls, read.text) == ([], "Well: <tool_call>")


@CALLERS
def test_only_one_call_is_made_where_calls_are_not_parallel(scripted, api):
    whole = ask(scripted, api, ASK, 100, tool="one").json()
    streamed = api.whole(stream(scripted, api, ASK, 100, tool="one").text)
    for answer in (whole, streamed):
        assert [made[2] for made in api.read(answer).calls] == [{"place": PLACES[0]}]


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
        asked = ask(live, api, text, keepwarm={"cache": "no-store"})
        assert api.read(asked.json()).receipt["reused"] == {}
    wrong = live.post(api.path, api.body(text), **{"X-Keepwarm-Cache": "often"})
    assert (wrong.status_code, "cache policy" in api.problem(wrong.json()).message) == (400, True)


@EVERY
def test_receipt_says_why_it_missed_if_that_is_asked_for(live, api):
    explain = {"keepwarm": {"explain": True}}
    text = f"{api.name} asks this only once, and then streams something else."
    whole = api.read(ask(live, api, text, **explain).json())
    streamed = api.read(api.whole(stream(live, api, text[::-1], **explain).text))
    for receipt in (whole.receipt, streamed.receipt):
        assert receipt["miss"]["reason"] in ("new", "diverged")
        assert receipt["miss"]["position"] == receipt["prompt_tokens"] - receipt["recomputed"]
    assert "miss" not in api.read(ask(live, api, text[::-2]).json()).receipt


@pytest.fixture(scope="module")
def hot(served_model, tmp_path_factory):
    """A server whose operator wants a temperature at which draws differ."""
    home = tmp_path_factory.mktemp("hot")
    settings = config.load({"KEEPWARM_HOME": str(home)}, temperature=100)
    with serve(replace(served_model, generation_config={"temperature": 0.6}), settings) as live:
        yield live


@EVERY
def test_temperature_that_a_request_leaves_open_is_the_operators(hot, api):
    def said(**fields):
        return api.read(ask(hot, api, **fields).json()).text

    silent = {"options": {"num_predict": 8}} if api is OLLAMA else {}
    exact = {} if api is OLLAMA else {"temperature": 0}
    assert len({said(**silent) for _ in range(4)}) > 1
    assert len({said(**exact) for _ in range(2)}) == 1


# Thoughts: an answer begins inside of one, unless it is switched off; past ones are shown.

OFF = {
    CHAT: {"reasoning_effort": "none"},
    MESSAGES: {"thinking": {"type": "disabled"}},
    RESPONSES: {"reasoning": {"effort": "none"}},
    OLLAMA: {"think": False},
}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    home, tokenizer = tmp_path_factory.mktemp("thinking"), make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    settings = config.load({"KEEPWARM_HOME": str(home)})
    path = write_checkpoint(home / "model", tokenizer=tokenizer, template=THINKING_CHATML)
    with serve(load(str(path), settings), settings) as live:
        yield live


@TALKERS
def test_thoughts_are_told_apart_and_can_be_switched_off(thinker, api):
    whole = api.read(ask(thinker, api).json())
    streamed = api.read(api.whole(stream(thinker, api).text))
    assert whole.reasoning
    assert (streamed.text, streamed.reasoning) == (whole.text, whole.reasoning)
    off = api.read(ask(thinker, api, **OFF[api]).json())
    assert (bool(off.text), off.reasoning) == (True, "")


@CALLERS
def test_thoughts_that_come_back_are_where_they_were(thinker, api):
    """The second prompt goes on from the tokens of the first answer, its thoughts included."""
    answer = ask(thinker, api).json()
    first = api.read(answer)
    body = api.going_on(ASK, answer)
    second = api.read(send(thinker, api, body).json())
    assert second.n_cached >= first.n_prompt
    assert second.n_prompt > first.n_prompt + first.n_output


def test_text_completion_is_all_text(thinker):
    """Whole and streamed alike: a thought that the model begins itself is there, with its tag."""
    think = thinker.host.engine.model.tokenizer.convert_tokens_to_ids("<think>")
    bias = {"logit_bias": {str(think): 100}}
    whole = ask(thinker, TEXT, **bias).json()
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    streamed = TEXT.read(TEXT.whole(stream(thinker, TEXT, **bias).text))
    assert TEXT.read(whole).text == streamed.text == "<think>" * 8


@pytest.mark.parametrize(("begun", "is_thought"), [("<think>I am", 1), ("<think>No</think>It", 0)])
def test_thought_or_answer_that_the_client_began_goes_on(thinker, begun, is_thought):
    """An answer that it began is no thought, though the template would open one."""
    said = {"role": "assistant", "content": begun}
    body = CHAT.body(ASK) | {"continue_final_message": True}
    answer = send(thinker, CHAT, body | {"messages": [*body["messages"], said]})
    assert bool(CHAT.read(answer.json()).reasoning) == bool(is_thought)


# Names


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


HEADERS = ("X-Keepwarm-Agent", "X-Claude-Code-Session-Id", "session-id", "x-session-id")


def test_agent_is_known_by_header_and_by_the_fields_of_each_api(live):
    wanted = set()
    for header in HEADERS:
        wanted.add(f"chat-{header.lower()}")
        named = {header: f"chat-{header.lower()}"}
        assert live.post(CHAT.path, CHAT.body(ASK, 1), **named).status_code == 200
    for api, names in NAMES.items():
        for number, fields in enumerate(names):
            wanted.add(f"{api.name}-{number}")
            ask(
                live,
                api,
                ASK,
                1,
                **json.loads(json.dumps(fields).replace("$", f"{api.name}-{number}")),
            )
    agents = live.host.engine.store.on_disk.agents
    wait_until(lambda: wanted <= {agent.id for agent in agents.all()})


# Wrong bodies


ROBOT = [{"role": "robot", "content": "x"}]
OWN_TOOLS = [  # a client's, and one that runs at Anthropic
    {"name": "read", "input_schema": {"type": "object"}},
    {"name": "ws", "type": "web_search_20250305"},
]
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
        ({"tools": OWN_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": OWN_TOOLS, "tool_choice": {"type": "tool", "name": "ws"}}, "tool_choice"),
    ],
    RESPONSES: [
        ({"input": ROBOT}, "input[0].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
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
    CHAT: f"maximum context length is {N_CONTEXT} tokens",
    TEXT: f"maximum context length is {N_CONTEXT} tokens",
    MESSAGES: f"tokens > {N_CONTEXT - 1} maximum",
    RESPONSES: f"maximum context length is {N_CONTEXT} tokens",
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
def test_stream_that_is_cancelled_from_elsewhere_ends_with_an_error(live, api):
    """Whose client still reads: without one, half an answer would look like a whole one."""
    read_vocabulary(live, LONG_TEXT)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(stream, live, api, **ENDLESS)
        wait_until(lambda: live.host.engine.stats().decoding, 60)
        (entry,) = live.get("/v1/dashboard/now").json()["running"]
        answer = live.post(f"/v1/dashboard/requests/{entry['number']}/cancel", {})
        assert answer.json()["cancelled"] is True
        assert "cancelled" in api.failed(reading.result().text)


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
    for path in ("/v1/models", "/api/tags", "/api/ps", "/api/version", "/v1/responses/resp_1"):
        assert keyed.get(path).status_code == 401
    elsewhere = {"Origin": "https://elsewhere.example", **headers("one")}
    assert keyed.post(api.path, api.body(text), **elsewhere).status_code == 403
    reused = [
        sum(api.read(ask(keyed, api, text, key=key).json()).receipt["reused"].values())
        for key in ("one", "two", "one")
    ]
    assert max(reused[:2]) < 16 < reused[2]  # the template's first tokens, of the API before


@pytest.fixture(scope="module")
def limited(serving):
    keys = ",".join(api.name for api in APIS)
    with serving(rate_per_minute=RATE, max_body_bytes=MAX_BODY, api_keys=keys) as live:
        yield live


@EVERY
def test_request_over_a_limit_says_when_to_come_back(limited, api):
    large = send(limited, api, api.body("x" * MAX_BODY), api.name)
    assert (large.status_code, bool(api.problem(large.json()).message)) == (413, True)
    again = send(limited, api, api.body(ASK), api.name)
    assert again.status_code == 429
    assert int(again.headers["retry-after"]) >= 1
    assert api.problem(again.json()).kind != "invalid_request_error"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A server with little time, whose model never ends by itself."""
    home = tmp_path_factory.mktemp("hasty")
    settings = config.load({"KEEPWARM_HOME": str(home)}, request_timeout_s=TIMEOUT_S)
    with serve(load(str(write_endless(home / "model")), settings), settings) as live:
        yield live


@EVERY
def test_deadline_is_a_status_or_the_last_words_of_a_stream(hasty, api):
    whole = send(hasty, api, api.body(ASK, 9000))
    assert whole.status_code == 504
    assert int(whole.headers["retry-after"]) >= 1
    assert f"within {TIMEOUT_S} seconds" in api.problem(whole.json()).message
    streamed = stream(hasty, api, ASK, 9000)
    assert streamed.status_code == 200
    assert f"within {TIMEOUT_S} seconds" in api.failed(streamed.text)


class Unloaded(EngineHost):
    """Its engine is taken as soon as a request has begun; `restore` gives it back."""

    async def submit_all(self, *given):
        answers = await super().submit_all(*given)
        self.taken, self._engine, self._pieces = self._engine, None, None
        return answers

    def restore(self):
        self._engine = self.taken


@pytest.fixture(scope="module")
def unloaded(served_model, tmp_path_factory):
    settings = config.load({"KEEPWARM_HOME": str(tmp_path_factory.mktemp("home"))})
    with serve(served_model, settings, Unloaded) as live:
        yield live


LOGPROBS = {TEXT: {"logprobs": 1}, RESPONSES: {"top_logprobs": 1}, MESSAGES: {}}


@EVERY
def test_answer_that_has_begun_comes_though_its_model_is_unloaded(unloaded, api):
    body = api.body(ASK) | LOGPROBS.get(api, {"logprobs": True})
    answer = send(unloaded, api, body)
    unloaded.host.restore()
    assert answer.status_code == 200, answer.text


def test_unknown_paths_and_methods_have_the_errors_of_their_api(live):
    assert live.get("/v1/nothing").status_code == 404
    for api in APIS:
        wrong = live.get(api.path)
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert "does not support GET" in api.problem(wrong.json()).message
    assert live.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    claude = live.get("/v1/nothing", **{"anthropic-version": "2023-06-01"}).json()
    assert (claude["type"], claude["error"]["type"]) == ("error", "not_found_error")
    assert "no endpoint" in live.post("/api/push", {}).json()["error"]


COUNTS = {MESSAGES: "/v1/messages/count_tokens", RESPONSES: "/v1/responses/input_tokens"}


@pytest.mark.parametrize("api", COUNTS, ids=lambda api: api.name)
def test_counted_tokens_are_those_of_the_answer(live, api):
    changes = [{}, {"tool": "forced"}]
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

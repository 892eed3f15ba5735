"""Bad bodies are rejected in the format of the API: never a 500, never a hang."""

import asyncio
import json

import pytest
from starlette.requests import Request

from keepwarm.errors import BadInput
from keepwarm.server.app import ROUTERS
from keepwarm.server.http.body import MAX_DEPTH, check_json

TEXT = {"role": "user", "content": "Hi"}
BODIES = {
    "/v1/chat/completions": {"messages": [TEXT], "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [TEXT], "max_tokens": 4},
}
TOOLS = {  # with a place for any JSON
    "/v1/chat/completions": '{"type":"function","function":{"name":"f","parameters":{"a":%s}}}',
    "/v1/responses": '{"type":"function","name":"f","parameters":{"a":%s}}',
    "/v1/messages": '{"name":"f","input_schema":{"type":"object","a":%s}}',
}
LEVELS = {  # that stand around this place
    "/v1/chat/completions": 5,
    "/v1/responses": 4,
    "/v1/messages": 4,
}

paths = pytest.mark.parametrize("path", BODIES)


def with_field(path, name, value):
    return f'{json.dumps(BODIES[path])[:-1]}, "{name}": {value}}}'.encode()


def with_tool(path, value):
    return with_field(path, "tools", f"[{TOOLS[path] % value}]")


def nested(levels):
    return "[" * levels + "1" + "]" * levels


def refused(answer, status, path):
    """The message of an error that has the shape of this path's API."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    if path.startswith("/v1/messages"):
        assert set(said) == {"type", "error"}
        assert said["type"] == "error"
        assert {"type", "message"} <= set(said["error"])
    else:
        assert set(said) == {"error"}
        assert set(said["error"]) == {"message", "type", "param", "code"}
    return said["error"]["message"]


@paths
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/x-www-form"])
def test_what_is_sent_as_something_else(live, path, kind):
    body = json.dumps(BODIES[path]).encode()
    said = refused(live.post(path, body, **{"Content-Type": kind}), 400, path)
    assert "application/json" in said


@paths
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(live, path, number):
    """Also where any JSON may stand: it would be written into the prompt, or sent back."""
    kind = {"Content-Type": "Application/JSON"}  # in capitals too
    assert "not finite" in refused(live.post(path, with_tool(path, number), **kind), 400, path)


@paths
def test_what_nests_deep(live, path):
    """As deep as it may be is answered; deeper is refused, and so is what no parser takes."""
    room = MAX_DEPTH - LEVELS[path]
    assert live.post(path, with_tool(path, nested(room))).status_code == 200
    said = refused(live.post(path, with_tool(path, nested(room + 1))), 400, path)
    assert f"{MAX_DEPTH} levels" in said
    for levels in (900, 10_000):
        refused(live.post(path, with_tool(path, nested(levels))), 400, path)


def test_a_session_that_nests_deep(live):
    """A client's own JSON inside of a text is its name for the conversation, whatever it is."""
    body = BODIES["/v1/messages"] | {"metadata": {"user_id": nested(10_000)}}
    assert live.post("/v1/messages", body).status_code == 200


@pytest.mark.parametrize(
    "arguments", [nested(120), nested(1_200), '{"a": "\\ud800"}', "{", "[1]", "7"]
)
def test_arguments_of_an_earlier_call_are_text_whatever_they_are(live, arguments):
    """A client's own JSON inside of a text: only what a template can walk through is parsed."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    gave = {"role": "tool", "tool_call_id": "c", "content": "1"}
    body = {"messages": [TEXT, said, gave], "max_tokens": 4}
    assert live.post("/v1/chat/completions", body).status_code == 200


CALLS = {  # a conversation with an earlier call, whose arguments are JSON
    "/v1/chat/completions": {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "%"}}],
    },
    "/v1/responses": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "%"},
    "/v1/messages": {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "%"}],
    },
    "/api/chat": {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": "%"}}],
    },
}


@pytest.mark.parametrize("path", CALLS)
def test_arguments_that_a_model_may_write_come_back(live, path):
    """Numbers of any size, and as deep as a body may be; the same anywhere else is refused."""
    key = "input" if path == "/v1/responses" else "messages"
    body = {"model": "tiny", key: [TEXT, CALLS[path], TEXT], "max_tokens": 4}

    def status(arguments, **more):
        return live.post(path, json.dumps(body | more).replace('"%"', arguments).encode())

    long, deep = "9" * 400, nested(MAX_DEPTH - 1)
    answer = status(f'{{"a": {long}, "b": {deep}}}')
    assert answer.status_code == 200, answer.text
    for refused_ones in (f'{{"a": [{deep}]}}', '{"a": NaN}'):
        assert status(refused_ones).status_code == 400
    assert "64 bits" in status(long).text
    assert "64 bits" in status("{}", name="f", unknown={"input": {"a": int(long)}}).text


@paths
def test_a_key_that_is_there_twice(live, path):
    """The last one counts, as parsers do it."""
    body = with_field(path, "temperature", '9, "temperature": 0')
    assert live.post(path, body).status_code == 200


@paths
@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_too_long_for_anything(live, path, digits):
    refused(live.post(path, with_field(path, "temperature", "9" * digits)), 400, path)


@paths
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32"])
def test_half_a_character_and_other_encodings(live, path, encoding):
    """Python's parser takes them all."""
    for name in ("\ud800", "plain"):
        body = json.dumps(BODIES[path] | {"user": name}, ensure_ascii=False)
        answer = live.post(path, body.encode(encoding, "surrogatepass"))
        if (encoding, name) == ("utf-8", "plain"):
            assert answer.status_code == 200
        else:
            assert "not UTF-8" in refused(answer, 400, path)


@paths
def test_caches_that_the_model_does_not_run_with(live, path):
    """Its heads are smaller than what is rounded together."""
    body = with_field(path, "keepwarm", '{"kv": {"kv_bits": 8}}')
    answer = live.post(path, body)
    assert answer.status_code == 400
    assert "KV options" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/messages/a/b", "/v1/responses/a/b", "/v1/chat", "/x"]
)
def test_nothing_is_there(live, path):
    assert path in refused(live.post(path, {}), 404, path)


def test_every_route_checks_its_body():
    routes = [route for router in ROUTERS for route in router.routes]
    unchecked = [
        route.path
        for route in routes
        if check_json not in {each.call for each in route.dependant.dependencies}
    ]
    assert len(routes) > 50
    assert unchecked == []


def test_a_prompt_is_checked_in_its_slot():
    """Which does it on a thread if the body is long: thousands of tools take 40 ms."""
    checks = []

    class Slot:
        async def build(self, check):
            checks.append(check)

    async def receive():
        return {"type": "http.request", "body": b"[NaN]"}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "path": "/", "headers": headers, "state": {"slot": Slot()}}
    asyncio.run(check_json(Request(scope, receive)))
    with pytest.raises(BadInput, match="not finite"):
        checks[0]()

"""Bad bodies are rejected in the format of the API: never a 500, never a hang."""

import json

import httpx
import pytest

from keepwarm.server.app import ROUTERS
from keepwarm.server.http.body import MAX_DEPTH, check_json

MAX_BYTES = 1 << 17
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


@pytest.fixture(scope="module")
def strict(serving):
    with serving(max_body_bytes=MAX_BYTES) as live:
        yield live


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
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'{"messages": [', b"\xff\xfe{", b'{"input": "\xff"}', b"[" * 10_000],
    ids=["empty", "null", "array", "cut off", "no text", "latin", "deep"],
)
def test_what_is_no_json_object(strict, path, body):
    refused(strict.post(path, body), 400, path)


@paths
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", "application/x-www-form"])
def test_what_is_sent_as_something_else(strict, path, kind):
    body = json.dumps(BODIES[path]).encode()
    said = refused(strict.post(path, body, **{"Content-Type": kind}), 400, path)
    assert "application/json" in said


@paths
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("streamed", ["true", "false"])
def test_numbers_that_are_none(strict, path, number, streamed):
    """Also where any JSON may stand: it would be written into the prompt, or sent back."""
    body = with_tool(path, number)[:-1] + f', "stream": {streamed}}}'.encode()
    assert "not finite" in refused(strict.post(path, body), 400, path)


@paths
def test_what_nests_deep(strict, path):
    """As deep as it may be is answered; deeper is refused, and so is what no parser takes."""
    room = MAX_DEPTH - LEVELS[path]
    assert strict.post(path, with_tool(path, nested(room))).status_code == 200
    said = refused(strict.post(path, with_tool(path, nested(room + 1))), 400, path)
    assert f"{MAX_DEPTH} levels" in said
    for levels in (900, 10_000):
        refused(strict.post(path, with_tool(path, nested(levels))), 400, path)


def test_a_schema_that_nests_deep(strict):
    path = "/v1/chat/completions"
    schema = '{"type":"object","properties":{"a":' * 100 + "{}" + "}}" * 100
    wanted = f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    refused(strict.post(path, with_field(path, "response_format", wanted)), 400, path)


def test_a_session_that_nests_deep(strict):
    """A client's own JSON inside of a text is its name for the conversation, whatever it is."""
    body = BODIES["/v1/messages"] | {"metadata": {"user_id": nested(10_000)}}
    assert strict.post("/v1/messages", body).status_code == 200


@pytest.mark.parametrize("arguments", [nested(1_200), '{"a": "\\ud800"}', "{", "[1]", "7"])
def test_arguments_of_an_earlier_call_are_text_whatever_they_are(strict, arguments):
    """A client's own JSON inside of a text: only what a template can walk through is parsed."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    gave = {"role": "tool", "tool_call_id": "c", "content": "1"}
    body = {"messages": [TEXT, said, gave], "max_tokens": 4}
    assert strict.post("/v1/chat/completions", body).status_code == 200


@paths
def test_json_is_json_in_capitals_too(strict, path):
    answer = strict.post(path, with_tool(path, "NaN"), **{"Content-Type": "Application/JSON"})
    assert "not finite" in refused(answer, 400, path)


@paths
def test_a_half_character_among_nested_values(strict, path):
    body = with_field(path, "user", f'["\\ud800", {nested(10)}]')
    assert "half a character" in refused(strict.post(path, body), 400, path)


@paths
def test_a_key_that_is_there_twice(strict, path):
    """The last one counts, as parsers do it."""
    body = with_field(path, "temperature", '9, "temperature": 0')
    assert strict.post(path, body).status_code == 200


@paths
@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_too_long_for_anything(strict, path, digits):
    refused(strict.post(path, with_field(path, "temperature", "9" * digits)), 400, path)


@paths
def test_caches_that_the_model_does_not_run_with(strict, path):
    """Its heads are smaller than what is rounded together."""
    body = with_field(path, "keepwarm", '{"kv": {"kv_bits": 8}}')
    answer = strict.post(path, body)
    assert answer.status_code == 400
    assert "KV options" in answer.json()["error"]["message"]


@paths
def test_what_is_too_large(strict, path):
    body = with_field(path, "user", json.dumps("x" * MAX_BYTES))
    refused(strict.post(path, body), 413, path)


@paths
def test_another_method_is_told_which_there_are(strict, path):
    answer = httpx.put(f"{strict.url}{path}")
    assert "PUT" in refused(answer, 405, path)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/messages/a/b", "/v1/responses/a/b", "/v1/chat", "/x"]
)
def test_nothing_is_there(strict, path):
    assert path in refused(strict.post(path, {}), 404, path)


def test_every_route_checks_its_body():
    routes = [route for router in ROUTERS for route in router.routes]
    unchecked = [
        route.path
        for route in routes
        if check_json not in {each.call for each in route.dependant.dependencies}
    ]
    assert len(routes) > 50
    assert unchecked == []

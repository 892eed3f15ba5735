"""No address in a request is fetched: a listening socket sees no connection."""

import socket

import pytest

TOOL = "fetch_it"
ADMIN = {"Authorization": "Bearer admin"}


class Bait:
    """An address for requests; the socket sees every connection to it."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/bait.json"

    def was_taken(self):
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self):
        self._socket.close()


@pytest.fixture
def bait():
    bait = Bait()
    yield bait
    bait.close()


@pytest.fixture(scope="module")
def trusting(serving):
    """A server whose admin may name paths too."""
    with serving(admin_key="admin", allow_model_paths=True) as live:
        yield live


def asked(content):
    return [{"role": "user", "content": content}]


def chat_parts(url):
    return (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "file", "file": {"file_url": url, "file_id": url}},
        {"type": "input_audio", "input_audio": {"url": url, "data": url}},
        {"type": "video_url", "video_url": {"url": url}},
    )


def message_parts(url):
    source = {"type": "url", "url": url}
    return (
        {"type": "image", "source": source},
        {"type": "document", "source": source},
    )


def response_parts(url):
    return (
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
    )


def test_parts_that_name_an_address_are_refused(trusting, bait):
    bodies = [
        *(("chat/completions", {"messages": asked([part])}) for part in chat_parts(bait.url)),
        *(("messages", {"messages": asked([part])}) for part in message_parts(bait.url)),
        *(("responses", {"input": asked([part])}) for part in response_parts(bait.url)),
    ]
    for path, body in bodies:
        answer = trusting.post(f"/v1/{path}", {"model": "m", "max_tokens": 4, **body})
        assert answer.status_code == 400, body
    assert not bait.was_taken()


def test_parts_of_the_history_that_name_an_address_are_not_fetched(trusting, bait):
    """In place of each stands a note."""
    after = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Well?"}]
    bodies = [
        ("chat/completions", {"messages": [*asked(chat_parts(bait.url)), *after]}),
        ("messages", {"messages": [*asked(message_parts(bait.url)), *after]}),
        ("responses", {"input": [*asked(response_parts(bait.url)), *after]}),
    ]
    for path, body in bodies:
        answer = trusting.post(f"/v1/{path}", {"model": "m", "max_tokens": 4, **body})
        assert answer.status_code == 200, answer.text
        assert "image" in answer.json()["keepwarm"]["unread"]
    assert not bait.was_taken()


def schemas(url):
    """References to elsewhere, where a schema may have them."""
    return (
        {"$ref": url},
        {"$schema": url, "$id": url, "type": "object", "properties": {"a": {"$ref": f"{url}#/a"}}},
        {"$id": url, "type": "object", "properties": {"a": {"$ref": "other.json"}}},
    )


def with_schema(schema):
    """A schema as a tool that must be called, and as the format of the answer; three APIs."""
    function = {"name": TOOL, "parameters": schema}
    chat = {"messages": asked("Well?"), "max_tokens": 4}
    claude = {"model": "m", **chat}
    gpt = {"input": "Well?", "max_output_tokens": 16}
    named = {"type": "json_schema", "name": "it", "schema": schema}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return (
        ("chat/completions", chat | {"tools": [{"type": "function", "function": function}],
                                     "tool_choice": "required"}),
        ("chat/completions", chat | {"response_format": form}),
        ("messages", claude | {"tools": [{"name": TOOL, "input_schema": schema}],
                               "tool_choice": {"type": "any"}}),
        ("responses", gpt | {"tools": [{"type": "function", **function}],
                             "tool_choice": "required"}),
        ("responses", gpt | {"text": {"format": named}}),
    )  # fmt: skip


def test_schemas_that_refer_elsewhere(trusting, bait):
    for schema in schemas(bait.url):
        for path, body in with_schema(schema):
            answer = trusting.post(f"/v1/{path}", body)
            assert answer.status_code in {200, 400}, answer.text
    assert not bait.was_taken()


def test_tools_that_others_would_run(trusting, bait):
    """Ignored or rejected; the servers that they name are not contacted."""
    server = {"type": "url", "url": bait.url, "name": "it"}
    mcp = {"type": "mcp", "server_label": "it", "server_url": bait.url}
    fetch = {"type": "web_fetch_20250910", "name": "web_fetch"}
    claude = {"model": "m", "max_tokens": 4, "messages": asked(f"Fetch {bait.url} for me.")}
    bodies = [
        ("messages", claude | {"mcp_servers": [server]}),
        ("messages", claude | {"tools": [fetch]}),
        ("responses", {"input": bait.url, "max_output_tokens": 16, "tools": [mcp]}),
    ]
    for path, body in bodies:
        assert trusting.post(f"/v1/{path}", body).status_code in {200, 400}
    assert not bait.was_taken()


def test_models_that_are_addresses(trusting, bait):
    """Whoever asks gets the model that is here, and an admin is told that there is no such one."""
    place = f"127.0.0.1:{bait.port}"
    for name in (bait.url, f"{place}/model", f"hf://{place}/model", f"//{place}/share/model"):
        body = {"model": name, "messages": asked("Well?"), "max_tokens": 4}
        assert trusting.post("/v1/chat/completions", body).json()["model"] == "tiny"
        for verb in ("load", "swap"):
            answer = trusting.post(f"/v1/admin/{verb}", {"model": name}, **ADMIN)
            assert answer.status_code == 404, answer.text
    assert trusting.host.ready
    assert not bait.was_taken()


def test_a_connection_is_seen(bait):
    """Without this the tests above would prove nothing."""
    with socket.create_connection(("127.0.0.1", bait.port)):
        assert bait.was_taken()
    assert not bait.was_taken()

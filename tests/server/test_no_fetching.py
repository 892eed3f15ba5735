"""No address in a request is fetched: a listening socket sees no connection."""

import socket

import pytest

TOOL = "fetch_it"
ADMIN = {"Authorization": "Bearer admin"}


class Bait:
    """An address for requests; the socket sees every connection to it."""

    def __init__(self, listening):
        listening.setblocking(False)
        self._socket = listening
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/bait.json"

    def was_taken(self):
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def bait():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Bait(listening)


@pytest.fixture(scope="module")
def trusting(serving):
    """A server whose admin may name paths too."""
    with serving(admin_key="admin", on_demand="/*") as live:
        yield live


def asked(content):
    return [{"role": "user", "content": content}]


def parts_of(url):
    """Parts of a message that name an address, by API; and the field that they go into."""
    source = {"type": "url", "url": url}
    return {
        ("chat/completions", "messages"): (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "file", "file": {"file_url": url, "file_id": url}},
            {"type": "input_audio", "input_audio": {"url": url, "data": url}},
            {"type": "video_url", "video_url": {"url": url}},
        ),
        ("messages", "messages"): (
            {"type": "image", "source": source},
            {"type": "document", "source": source},
        ),
        ("responses", "input"): (
            {"type": "input_image", "image_url": url},
            {"type": "input_file", "file_url": url},
        ),
    }


def test_parts_that_name_an_address_are_refused_or_noted_and_not_fetched(trusting, bait):
    """Refused in the newest message; in the history a note stands in place of each."""
    after = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Well?"}]
    for (path, field), parts in parts_of(bait.url).items():
        body = {"model": "m", "max_tokens": 4}
        for part in parts:
            answer = trusting.post(f"/v1/{path}", body | {field: asked([part])})
            assert answer.status_code == 400, part
        answer = trusting.post(f"/v1/{path}", body | {field: [*asked(parts), *after]})
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

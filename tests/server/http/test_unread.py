"""Parts that a text model cannot read: notes in the history, refused in the newest message."""

import base64

import anthropic
import openai
import pytest

from keepwarm import config
from keepwarm.errors import BadField
from keepwarm.prefix.policy import Policy
from keepwarm.server.anthropic import request as messages
from keepwarm.server.anthropic.shapes import MessagesRequest
from keepwarm.server.http.content import NOTE
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.openai import chat
from keepwarm.server.openai.shapes import ChatRequest
from keepwarm.server.responses import request as responses
from keepwarm.server.responses.shapes import ResponsesRequest
from keepwarm.text.request import KVOptions

CALLER = RequestFields("", None, Policy.READ_WRITE, False, KVOptions(), None)
IMAGE, RESULT = NOTE.format("image"), NOTE.format("tool result")
SUMMARY = NOTE.format("summary")
PNG = base64.b64encode(b"\x89PNG").decode()
TEXT = base64.b64encode("Grüße\n".encode()).decode()
NEXT = [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "Well?"}]

CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
MESSAGE_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG},
}
RESPONSE_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}


def chat_asked(*given, **settings):
    body = ChatRequest.model_validate({"messages": list(given)})
    return chat.request_of(body, CALLER, config.load({}, **settings))


def message_asked(*given, **settings):
    body = MessagesRequest.model_validate({"messages": list(given), "max_tokens": 9})
    return messages.request_of(body, CALLER, config.load({}, **settings))


def response_asked(*given, **settings):
    body = ResponsesRequest.model_validate({"input": list(given)})
    items = responses.items_of(body.input)
    return responses.request_of(body, items, CALLER, config.load({}, **settings))


every_api = pytest.mark.parametrize(
    ("asked", "image", "list_name"),
    [
        (chat_asked, CHAT_IMAGE, "messages"),
        (message_asked, MESSAGE_IMAGE, "messages"),
        (response_asked, RESPONSE_IMAGE, "input"),
    ],
)


def user(*parts):
    return {"role": "user", "content": list(parts)}


def texts(message):
    """The texts of a message for the engine."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


# Everywhere.


@every_api
def test_an_image_in_the_history_is_a_note(asked, image, list_name):
    made = asked(user(image), *NEXT)
    assert texts(made.messages[0]) == [IMAGE]
    assert made.unread == ("image",)
    assert asked(user(image, image), *NEXT).unread == ("image",)


@every_api
def test_an_image_in_the_newest_message_is_refused(asked, image, list_name):
    with pytest.raises(BadField, match="reads text only; leave it out") as refused:
        asked(*NEXT, user(image))
    assert refused.value.param == f"{list_name}[2].content[0]"


@every_api
def test_a_system_message_behind_it_does_not_make_it_history(asked, image, list_name):
    with pytest.raises(BadField):
        asked(user(image), {"role": "system", "content": "Be kind."})


@every_api
def test_with_the_setting_it_is_a_note_too(asked, image, list_name):
    made = asked(*NEXT, user(image), skip_unreadable=True)
    assert texts(made.messages[2]) == [IMAGE]
    assert made.unread == ("image",)


@every_api
def test_without_such_parts_nothing_is_named(asked, image, list_name):
    assert asked(*NEXT).unread == ()


# Tool results are the history, also in the newest message.


def test_an_image_from_a_tool_of_chat():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [CHAT_IMAGE]}
    made = chat_asked(NEXT[1], {"role": "assistant", "tool_calls": [call]}, result)
    assert texts(made.messages[2]) == [IMAGE]


def test_an_image_from_a_tool_of_messages():
    """Claude Code sends a PDF that it read beside the result; the user did not put it there."""
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [MESSAGE_IMAGE]}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
    made = message_asked(NEXT[1], {"role": "assistant", "content": [call]}, user(result, pdf))
    assert made.messages[2]["content"] == IMAGE
    assert texts(made.messages[3]) == [NOTE.format("document")]
    assert made.unread == ("document", "image")


def test_an_image_from_a_tool_of_responses():
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [RESPONSE_IMAGE]}
    made = response_asked(NEXT[1], call, result)
    assert (made.messages[2]["role"], made.messages[2]["content"]) == ("tool", IMAGE)


# Calls of tools that run elsewhere.


def test_server_tools_of_messages():
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    said = {"role": "assistant", "content": [search, found, {"type": "text", "text": "Rain."}]}
    made = message_asked(NEXT[1], said, NEXT[1])
    assert made.messages[1]["content"] == NOTE.format("tool call") + RESULT + "Rain."
    assert made.unread == ("tool call", "tool result")


PAGE = {"type": "document", "source": {"type": "text", "data": "Rain."}, "title": None}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("web_fetch", {"type": "web_fetch_result", "url": "x.org", "content": PAGE}),
        ("code_execution", {"type": "code_execution_result", "stdout": "1", "content": []}),
        ("bash_code_execution", {"type": "bash_code_execution_result", "return_code": 0}),
        (
            "text_editor_code_execution",
            {"type": "text_editor_code_execution_view_result", "content": "x = 1"},
        ),
        (
            "tool_search",
            {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "look"}],
            },
        ),
        ("advisor", {"type": "advisor_result", "text": "Wait."}),
        ("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}),
    ],
)
def test_results_of_server_tools_that_are_one_object(kind, content):
    result = {"type": f"{kind}_tool_result", "tool_use_id": "s", "content": content}
    made = message_asked(NEXT[1], {"role": "assistant", "content": [result]}, NEXT[1])
    assert made.messages[1]["content"] == RESULT
    assert made.unread == ("tool result",)


def test_a_summary_of_another_server():
    """The conversation before it is lost to this model; the receipt must say so."""
    foreign = {"type": "compaction", "id": "c", "encrypted_content": "gAAAAB"}
    made = response_asked(foreign, NEXT[1])
    assert made.messages[0] == {"role": "assistant", "content": SUMMARY}
    assert made.unread == ("summary",)
    own = foreign | {"encrypted_content": responses.encode_reasoning("They met.")}
    made = response_asked(own, NEXT[1])
    assert (made.messages[0]["content"], made.unread) == ("They met.", ())


def test_encrypted_reasoning_of_another_server():
    """It is left out and named, on both APIs that have such; one's own is read."""
    said = {"type": "message", "role": "assistant", "content": "Hi."}
    foreign = {"type": "reasoning", "id": "r", "encrypted_content": "gAAAAB", "summary": []}
    made = response_asked(NEXT[1], foreign, said, NEXT[1])
    assert made.messages[1] == {"role": "assistant", "content": "Hi."}
    assert made.unread == ("reasoning",)
    for text in ("They met.", ""):
        own = foreign | {"encrypted_content": responses.encode_reasoning(text)}
        made = response_asked(NEXT[1], own, said, NEXT[1])
        assert (made.messages[1].get("reasoning_content", ""), made.unread) == (text, ())
    blocks = [{"type": "redacted_thinking", "data": "Em"}, {"type": "text", "text": "Hi."}]
    made = message_asked(NEXT[1], {"role": "assistant", "content": blocks}, NEXT[1])
    assert made.messages[1] == {"role": "assistant", "content": "Hi."}
    assert made.unread == ("reasoning",)


@pytest.mark.parametrize(
    ("content", "said", "unread"),
    [("They met.", "They met.", ()), (None, SUMMARY, ("summary",))],
)
def test_a_summary_of_messages(content, said, unread):
    summary = {"type": "compaction", "content": content}
    made = message_asked(NEXT[1], {"role": "assistant", "content": [summary]}, NEXT[1])
    assert (made.messages[1]["content"], made.unread) == (said, unread)


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}],
        [{"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}],
        [{"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}}],
    ],
)
def test_calls_of_responses(items):
    made = response_asked(NEXT[1], *items, NEXT[1])
    assert made.messages[1] == {"role": "assistant", "content": NOTE.format("tool call")}
    assert made.unread == ("tool call",)


@pytest.mark.parametrize(
    ("output", "said", "unread"),
    [
        ("a.txt", "a.txt", ()),
        ([{"stdout": "a.txt", "stderr": ""}], RESULT, ("tool result",)),
        ({"type": "computer_screenshot", "image_url": "x"}, RESULT, ("tool result",)),
    ],
)
def test_results_of_other_tools(output, said, unread):
    made = response_asked(NEXT[1], {"type": "shell_call_output", "call_id": "c", "output": output})
    assert made.messages[1] == {"role": "user", "content": said}
    assert made.unread == unread


def test_a_result_of_a_function_is_text_or_parts():
    result = {"type": "function_call_output", "call_id": "c", "output": {"stdout": "x"}}
    with pytest.raises(BadField, match="neither text nor a list of parts"):
        response_asked(result)


def test_a_custom_call_is_read_as_a_function_with_one_argument():
    function = {"name": "patch", "arguments": '{"input": "+ \\"ä\\""}'}
    expected = [{"id": "c", "type": "function", "function": function}]
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": '+ "ä"'}}
    made = chat_asked(NEXT[1], {"role": "assistant", "tool_calls": [custom]})
    assert made.messages[1]["tool_calls"] == expected
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": '+ "ä"'}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."}
    made = response_asked(NEXT[1], call, result)
    assert made.messages[1]["tool_calls"] == expected
    assert made.messages[2] == {"role": "tool", "tool_call_id": "c", "content": "Done."}
    assert made.unread == ()


# Text documents.


@pytest.mark.parametrize(
    "part",
    [
        {"type": "file", "file": {"filename": "a.md", "file_data": TEXT}},
        {
            "type": "file",
            "file": {"filename": "a.md", "file_data": f"data:text/plain;base64,{TEXT}"},
        },
    ],
)
def test_a_text_file_of_chat_is_read(part):
    assert texts(chat_asked(user(part)).messages[0]) == ["a.md\nGrüße\n"]


def test_a_text_file_of_responses_is_read():
    part = {"type": "input_file", "filename": "a.txt", "file_data": TEXT}
    assert texts(response_asked(user(part)).messages[0]) == ["a.txt\nGrüße\n"]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "Grüße\n"},
        {"type": "base64", "media_type": "text/plain", "data": TEXT},
        {"type": "content", "content": "Grüße\n"},
        {"type": "content", "content": [{"type": "text", "text": "Grüße\n"}]},
    ],
)
def test_a_text_document_of_messages_is_read(source):
    part = {"type": "document", "title": "a.txt", "source": source}
    assert texts(message_asked(user(part)).messages[0]) == ["a.txt\nGrüße\n"]


def test_a_search_result_of_messages_is_read():
    content = [{"type": "text", "text": "Rain."}, MESSAGE_IMAGE]
    found = {"type": "search_result", "source": "x.org", "title": "Oslo", "content": content}
    made = message_asked(user(found), *NEXT)
    assert texts(made.messages[0]) == [f"Oslo\nx.org\nRain.\n{IMAGE}"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pdf", TEXT),
        ("a", TEXT),
        ("a.txt", base64.b64encode(b"\xff\xfe").decode()),
        ("a.txt", "not base64"),
        ("a.txt", f"data:application/pdf;base64,{TEXT}"),
    ],
)
def test_another_file_is_not(name, data):
    part = {"type": "file", "file": {"filename": name, "file_data": data}}
    assert texts(chat_asked(user(part), *NEXT).messages[0]) == [NOTE.format("file")]
    with pytest.raises(BadField):
        chat_asked(user(part))


def test_a_kind_that_nobody_knows_is_a_part():
    """The note does not quote what a client made up."""
    made = chat_asked(user({"type": "hologram-77"}), *NEXT)
    assert texts(made.messages[0]) == [NOTE.format("part")]


# As the official clients send them.


def test_the_conversation_goes_on_and_stays_warm(live):
    """Before, every turn after an image was a 400, for ever."""
    words = "What does the dog under the tree see? " * 20
    turns = [user({"type": "text", "text": words}, CHAT_IMAGE), *NEXT]
    options = {"model": "m", "max_tokens": 2, "temperature": 0}
    with live.openai() as client:
        first = client.chat.completions.create(messages=turns, **options)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        second = client.chat.completions.create(messages=[*turns, said, NEXT[1]], **options)
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            client.chat.completions.create(messages=turns[:1], **options)
    receipt = first.model_extra["keepwarm"]
    assert receipt["unread"] == ["image"]
    assert "ignored_fields" not in receipt  # it is named once
    n_first = first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= n_first


def test_messages_go_on_too(live):
    client = anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0)
    options = {"model": "m", "max_tokens": 2}
    with client:
        answer = client.messages.create(messages=[user(MESSAGE_IMAGE), *NEXT], **options)
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            client.messages.create(messages=[user(MESSAGE_IMAGE)], **options)
    assert answer.model_extra["keepwarm"]["unread"] == ["image"]

"""An answer that the client began: Anthropic's last message, `continue_final_message`."""

import pytest

from keepwarm.errors import BadInput
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Request
from keepwarm.text.template import write

USER = {"role": "user", "content": "What is the answer?"}
BEGUN = {"role": "assistant", "content": "The answer is ("}
CHAT = {"model": "x", "messages": [USER, BEGUN], "max_tokens": 12}
GOING_ON = {"continue_final_message": True}


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


@pytest.fixture(scope="module")
def claude(live):
    return live.anthropic()


@pytest.fixture(scope="module")
def expected(live, client):
    """What follows when the whole text is sent as it is."""
    text = write(live.host.engine.model.tokenizer, [USER]) + BEGUN["content"]
    whole = client.completions.create(model="x", prompt=text, max_tokens=12)
    return whole.choices[0].text, whole.usage.prompt_tokens


def test_the_answer_goes_on_where_the_client_stopped(client, claude, expected):
    text, n_tokens = expected
    for extra in (GOING_ON, GOING_ON | {"add_generation_prompt": False}):
        chat = client.chat.completions.create(**CHAT, extra_body=extra)
        assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == expected
    options = {"chat_template_kwargs": GOING_ON}
    chat = client.chat.completions.create(**CHAT, extra_body=options)
    assert chat.choices[0].message.content == text
    other = client.chat.completions.create(**CHAT).choices[0].message.content
    assert other != text  # else all of this could be said of any answer
    message = claude.messages.create(**CHAT)
    assert message.content[0].text == text
    counted = claude.messages.count_tokens(model="x", messages=CHAT["messages"])
    assert counted.input_tokens == n_tokens
    with claude.messages.stream(**CHAT) as stream:
        assert "".join(stream.text_stream) == text


def test_an_empty_beginning_is_none(claude):
    plain = claude.messages.create(**CHAT | {"messages": [USER]})
    empty = claude.messages.create(**CHAT | {"messages": [USER, BEGUN | {"content": " "}]})
    assert empty.content == plain.content


def test_the_next_turn_finds_the_whole_answer_warm(client, expected):
    said = {"role": "assistant", "content": BEGUN["content"] + expected[0]}
    first = client.chat.completions.create(**CHAT, extra_body=GOING_ON)
    again = CHAT | {"messages": [USER, said, USER]}
    usage = client.chat.completions.create(**again).usage
    n_first = first.usage.prompt_tokens + first.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= n_first - 1


def test_an_agent_keeps_both_parts_as_one_message(live, client, expected):
    agent = {"X-Keepwarm-Agent": "begun"}
    client.chat.completions.create(**CHAT, extra_body=GOING_ON, extra_headers=agent)
    more = {"model": "x", "messages": [USER], "max_tokens": 1}
    going_on = live.openai(base_url=f"{live.url}/v1/agents/begun")
    continued = going_on.chat.completions.create(**more)
    said = {"role": "assistant", "content": BEGUN["content"] + expected[0]}
    whole = client.chat.completions.create(**more | {"messages": [USER, said, USER]})
    assert continued.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize(
    ("extra", "messages", "said"),
    [
        ({"add_generation_prompt": False}, [USER, BEGUN], "no answer is asked for"),
        (GOING_ON | {"add_generation_prompt": True}, [USER, BEGUN], "exclude each other"),
        (GOING_ON, [USER], "cannot be continued"),
    ],
)
def test_what_cannot_be_continued_is_refused(live, extra, messages, said):
    answer = live.post("/v1/chat/completions", {"messages": messages, **extra})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_call_cannot_be_continued(live):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = BEGUN | {"tool_calls": [call]}
    prompter = Prompter(live.host.engine.model.tokenizer)
    with pytest.raises(BadInput, match="without tool calls"):
        prompter.render(Request(messages=[USER, calling], partial_answer=True))

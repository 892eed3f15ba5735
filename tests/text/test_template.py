"""Probing a chat template, and rewriting messages so that it shows them all."""

import pytest

from keepwarm.errors import BadInput
from keepwarm.text.prompt import Prompter
from keepwarm.text.request import Request
from keepwarm.text.template import SYSTEM_LABEL, Template, normalise, text_of, write
from tests.kit.checkpoints import CHATML
from tests.kit.tokenizers import WITH_TOOLS, make
from tests.text.formats import LINES

# Small templates, each with one property of a family of models.
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
HOISTING = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '[' + m.content + ']' }}{% endfor %}"
)
ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ '[' + m.content + ']' }}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)


def calls(arguments: str, message: str) -> str:
    """A template with these expressions for a call's arguments and for a message."""
    call = "{% for c in m.tool_calls %}{{ c.function.name + '(' }}" + arguments + "){% endfor %}"
    return "{% for m in messages %}" + message.replace("CALLS", call) + "{% endfor %}"


CALLS = calls("{{ c.function.arguments | tojson }}", "{{ m.content }}CALLS")
TEXT_CALLS = calls("{{ c.function.arguments }}", "{{ m.content }}CALLS")
NO_CONTENT_CALLS = calls(
    "{{ '' + c.function.arguments }}",
    "{% if m.content is none %}CALLS{% else %}{{ m.content }}{% endif %}",
)

SYSTEM = {"role": "system", "content": "Be brief."}
LATE = {"role": "system", "content": "It is noon."}
ASK = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "The fox."}
NEXT = {"role": "user", "content": "Why?"}


@pytest.fixture
def template_of(tmp_path):
    """A function: a tokenizer with this template, and what the probe finds."""

    def look(text, **kwargs):
        tokenizer = make(tmp_path / "tokenizer", template=text, **kwargs)
        return tokenizer, Template.of(tokenizer)

    return look


def test_a_plain_template_takes_every_message_where_it_is(template_of):
    _, template = template_of(CHATML)
    assert template.exists
    assert template.takes_system
    assert template.takes_more_systems
    assert template.takes_late_system
    assert template.takes_user_twice
    assert not template.renders_tools
    talk = [SYSTEM, LATE, ASK, ANSWER, LATE, NEXT, NEXT]
    assert template.conform(talk) == talk
    assert template.after_answer_text == "<|im_end|>\n"


def test_what_follows_an_answer_only_at_the_end_does_not_follow_every_answer(template_of):
    """As in gpt-oss: the last answer ends differently from those before it."""
    ends = "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}"
    _, template = template_of("{% for m in messages %}{{ m.content }}" + ends + "{% endfor %}")
    assert template.after_answer_text == ""


def test_a_model_without_a_template(template_of):
    tokenizer, template = template_of(None)
    assert not template.exists
    talk = [SYSTEM, ASK, LATE, NEXT]
    assert template.conform(talk) == talk
    assert write(tokenizer, talk) == "Be brief.\n\nWho?\n\nIt is noon.\n\nWhy?"


def test_a_template_that_takes_no_system_message_gets_it_in_the_user_message(template_of):
    tokenizer, template = template_of(ALTERNATING)
    assert not template.takes_system
    assert not template.takes_user_twice
    shown = template.conform([SYSTEM, ASK, ANSWER, LATE, NEXT])
    assert [message["role"] for message in shown] == ["user", "assistant", "user"]
    assert shown[0]["content"] == f"{SYSTEM_LABEL}Be brief.\n\nWho?"
    assert shown[2]["content"] == f"{SYSTEM_LABEL}It is noon.\n\nWhy?"
    assert "Be brief." in write(tokenizer, shown)


@pytest.mark.parametrize("text", [HOISTING, ONE_SYSTEM])
def test_a_late_system_message_that_would_be_moved_or_lost_stays_where_it_is(template_of, text):
    """Moved to the front it would change the prompt from there on, turn by turn."""
    tokenizer, template = template_of(text)
    assert template.takes_system
    assert not template.takes_late_system
    shown = template.conform([SYSTEM, ASK, ANSWER, LATE, NEXT])
    assert shown[3] == {"role": "user", "content": f"{SYSTEM_LABEL}It is noon."}
    assert write(tokenizer, shown).startswith("Be brief.[Who?][The fox.]")


def test_system_messages_in_a_row_become_one_where_only_one_is_read(template_of):
    tokenizer, template = template_of(ONE_SYSTEM)
    assert not template.takes_more_systems
    shown = template.conform([SYSTEM, LATE, ASK])
    assert [message["role"] for message in shown] == ["system", "user"]
    assert write(tokenizer, shown) == "Be brief.\n\nIt is noon.[Who?]"


def test_thinking_that_is_opened(template_of):
    tokenizer, template = template_of(THINKING, tokens=("<think>", "</think>"))
    prompt = Prompter(tokenizer, template).render(Request(messages=[ASK]))
    assert prompt.generation_prompt == "<|im_start|>assistant\n<think>\n"
    assert prompt.opens_thinking
    other, silent = template_of(THINKING)  # without such tokens mlx-lm turns reasoning off
    assert not Prompter(other, silent).render(Request(messages=[ASK])).opens_thinking
    assert write(tokenizer, [ASK], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("text", "renders"),
    [
        (WITH_TOOLS, True),
        (CHATML, False),
        ("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML, True),
        ("{{ tools[0].function.name if tools else '' }}", True),
        ("{{ raise_exception('no') }}", False),
        ("{{ tools.nothing.at_all }}", False),
        (None, False),
    ],
)
def test_whether_a_template_renders_tools_is_tried_out(template_of, text, renders):
    _, template = template_of(text)
    assert template.renders_tools is renders


@pytest.mark.parametrize(
    ("text", "as_text", "content", "shown"),
    [
        (CALLS, False, "", 'search({"q": "fox"})'),
        (TEXT_CALLS, True, "", 'search({"q": "fox"})'),
        (NO_CONTENT_CALLS, True, None, 'search({"q": "fox"})'),
    ],
)
@pytest.mark.parametrize("sent", ['{"q": "fox"}', {"q": "fox"}])
def test_tool_calls_are_rendered_as_json_whatever_the_template_expects(
    template_of, text, as_text, content, shown, sent
):
    tokenizer, template = template_of(text)
    assert template.arguments_as_text is as_text
    assert template.call_content == content
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": sent}}
    asked = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert write(tokenizer, template.conform(asked)).endswith(shown)


@pytest.mark.parametrize("between", ["", "\n", "\n\n ", "Calls: "])
def test_blank_text_between_a_message_and_its_calls(tmp_path, between):
    text = LINES.replace("'\n' if", f"{between!r} if")
    tokenizer = make(tmp_path, template=text, parser="json_tools", tokens=["<tool_call>"])
    assert Template.of(tokenizer).before_call == (between if between.isspace() else "")


@pytest.mark.parametrize(
    ("sent", "rendered"),
    [
        ("{broken", "{broken"),
        ('{"a": "\\ud83e"}', '{"a": "\\ud83e"}'),
        ("[1]", [1]),
        ("", {}),
        (7, 7),
    ],
)
def test_arguments_that_are_not_json_stay_as_they_came(template_of, sent, rendered):
    _, template = template_of(CALLS)
    call = {"function": {"name": "f", "arguments": sent}}
    (shown,) = template.conform([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert shown["tool_calls"][0]["function"]["arguments"] == rendered


ITEMS = calls("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "CALLS")


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ('{"a": 1}', "a=1"),
        ({"a": 1}, "a=1"),
        ("", ""),
        ("null", ""),
        (None, ""),
        ("[]", ""),
        ('{"a": 1', 'arguments={"a": 1'),
        ("[1]", "arguments=[1]"),
        ("5", "arguments=5"),
        ("[" * 150 + "]" * 150, "arguments=" + "[" * 150 + "]" * 150),
    ],
)
def test_arguments_that_are_no_object_reach_a_template_that_wants_one(template_of, sent, shown):
    """Else one such call would end its conversation for ever."""
    tokenizer, template = template_of(ITEMS)
    call = {"function": {"name": "f", "arguments": sent}}
    asked = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert write(tokenizer, template.conform(asked)).endswith(f"f({shown})")


def test_messages_are_normalised():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalise({"role": "developer", "content": parts}) == {
        "role": "system",
        "content": "a\nb",
    }
    assert normalise({"role": "assistant", "content": None, "tool_calls": []}) == {
        "role": "assistant",
        "content": "",
    }
    thought = normalise({"role": "assistant", "content": "x", "reasoning": "y"})
    assert thought["reasoning_content"] == "y"
    assert text_of({"content": []}) == text_of({}) == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "no role"),
        ({"role": 7, "content": "x"}, "no role"),
        ({"role": "user", "content": 7}, "neither text nor a list"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "'image_url'"),
        ({"role": "user", "content": [7]}, "'int'"),
    ],
)
def test_invalid_messages_are_refused(message, reason):
    """An image is never dropped silently."""
    with pytest.raises(BadInput, match=reason):
        normalise(message)


def test_a_template_that_refuses_everything(template_of):
    tokenizer, template = template_of("{{ raise_exception('never') }}")
    assert template == Template(exists=True, takes_user_twice=False)
    with pytest.raises(BadInput, match="never"):
        write(tokenizer, [ASK])

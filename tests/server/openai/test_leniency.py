"""What other servers accept: each is honoured here too, or refused by name."""

import openai
import pytest

from keepwarm import config
from keepwarm.cache.policy import Policy
from keepwarm.errors import BadField
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.openai import chat, completions
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.text.request import Format, KVOptions

SETTINGS = config.load({})
CALLER = RequestFields("", None, Policy.READ_WRITE, False, KVOptions(), None)
USER = {"role": "user", "content": "Well?"}
YES_OR_NO = 'root ::= "yes" | "no"'


def asked(**fields):
    body = ChatRequest.model_validate({"messages": [USER], **fields})
    return chat.request_of(body, CALLER, SETTINGS)


@pytest.fixture(scope="module")
def client(live):
    with live.openai() as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model="m", messages=[USER], temperature=0, **options)


# Numbers and stop strings.


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 0}, "max_tokens", 0),
        ({"max_tokens": 9, "max_completion_tokens": 0}, "max_tokens", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 40.0}, "top_k", 40),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["", "END"]}, "stop", ("END",)),
    ],
)
def test_other_ways_to_write_a_number(fields, name, value):
    assert getattr(asked(**fields).sampling, name) == value


@pytest.mark.parametrize("fields", [{"top_k": 2.5}, {"top_k": -2}, {"max_tokens": -2}])
def test_what_nobody_accepts(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        asked(**fields)


def test_a_text_completion_too():
    def sampling(**fields):
        body = CompletionRequest.model_validate({"prompt": "a", **fields})
        return completions.requests_of(body, CALLER)[0].sampling

    assert sampling().max_tokens == completions.DEFAULT_MAX_TOKENS
    assert sampling(max_tokens=-1).max_tokens is None
    assert sampling(max_tokens=0).max_tokens == 0


def test_a_top_p_of_zero_is_the_likeliest_token(client):
    hot = {"extra_body": {"temperature": 2}, "max_tokens": 4}
    assert ask(client, top_p=0, **hot).choices[0].message == (
        ask(client, max_tokens=4).choices[0].message
    )


def test_no_tokens_are_an_empty_answer_with_usage(client):
    answer = ask(client, max_tokens=0, n=2)
    assert [(c.message.content, c.finish_reason) for c in answer.choices] == [("", "length")] * 2
    assert answer.usage.completion_tokens == 0
    chunks = list(ask(client, max_tokens=0, stream=True, stream_options={"include_usage": True}))
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons == [None, "length"]
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_no_tokens_with_echo_are_the_prompts(client):
    asked = {"model": "m", "prompt": ["One", "Two"], "echo": True, "max_tokens": 0}
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == ["One", "Two"]
    chunks = list(client.completions.create(**asked, stream=True))
    assert [c.text for chunk in chunks for c in chunk.choices if c.text] == ["One", "Two"]


# Grammars.


def test_an_answer_follows_a_grammar_of_llama_cpp(client):
    answer = ask(client, max_tokens=8, extra_body={"grammar": YES_OR_NO})
    assert answer.choices[0].message.content in ("yes", "no")
    grammar = 'start: "yes" | "no"'
    asked = {"model": "m", "prompt": "Well?", "max_tokens": 8, "extra_body": {"grammar": grammar}}
    assert client.completions.create(**asked).choices[0].text in ("yes", "no")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= "yes', "GBNF grammar cannot be read"),
        ('other ::= "yes"', "GBNF grammar cannot be read"),
        ('root ::= start\nstart ::= "yes"', "Rule 'start' already exists"),
        (f"root ::= {'(' * 5000}", "GBNF grammar cannot be read"),
        ("root ::= " + '"a" ' * 5000, "characters of GBNF; send at most 16,384"),
        ("nonsense", "cannot be compiled"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(client, grammar, why):
    with pytest.raises(openai.BadRequestError, match=why):
        ask(client, extra_body={"grammar": grammar})


def test_a_grammar_beside_another_format_is_refused():
    assert asked(grammar=YES_OR_NO).format == Format(grammar=YES_OR_NO)
    with pytest.raises(BadField, match="cannot be combined"):
        asked(grammar=YES_OR_NO, response_format={"type": "json_object"})

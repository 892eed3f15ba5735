"""Requests that used to end in a 500, or were accepted and meant something else."""

import inspect
import json
import re

import jinja2
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from keepwarm import config
from keepwarm.models.load import load
from keepwarm.text.prompt import RESERVED, Prompter
from keepwarm.text.template import write
from tests.kit.checkpoints import CHATML, make_tokenizer, write_checkpoint
from tests.server.conftest import serve

CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "the fox"}]
N_TOKENIZER = make_tokenizer().get_vocab_size()
N_VOCAB = N_TOKENIZER + 32  # as in many models: more logits than the tokenizer has tokens
OPTIONS = {"documents", "continue_final_message"}  # for the template, so they may be set
DIVIDES = "{% if by is defined %}{{ 1 // by }}{% for i in range(by) %}{% endfor %}{% endif %}"

# One whole number in each place that JSON has; NUMBER stands for it.
NUMBER = "12345678"
PLACES = [
    (CHAT, {"messages": TALK, "seed": NUMBER}),
    (CHAT, {"messages": TALK, "max_tokens": NUMBER}),
    (CHAT, {"messages": TALK, "unknown": [{"deep": NUMBER}]}),
    (CHAT, {"messages": TALK, "logit_bias": {"1": NUMBER}}),
    (CHAT, {"messages": TALK, "chat_template_kwargs": {"x": NUMBER}}),
    (CHAT, {"messages": TALK, "keepwarm": {"kv": {"max_kv_size": NUMBER}}}),
    (
        CHAT,
        {
            "messages": TALK,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "integer", "maximum": NUMBER}},
            },
        },
    ),
    ("/v1/completions", {"prompt": [NUMBER]}),
    ("/v1/completions", {"prompt": "a", "temperature": NUMBER}),
    ("/v1/responses", {"input": "a", "max_output_tokens": NUMBER}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a", "extra": NUMBER}]}),
    ("/v1/messages", {"messages": TALK, "max_tokens": NUMBER}),
    ("/v1/messages", {"messages": TALK, "max_tokens": 1, "metadata": {"x": NUMBER}}),
    ("/v1/agents", {"id": "a", "retention_s": NUMBER}),
    ("/v1/cache/lookup", {"messages": TALK, "seed": NUMBER}),
]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    directory = tmp_path_factory.mktemp("padded")
    write_checkpoint(directory, template=DIVIDES + CHATML, shape={"vocab_size": N_VOCAB})
    settings = config.load({"KEEPWARM_HOME": str(tmp_path_factory.mktemp("home"))})
    with serve(load(str(directory), settings), settings) as server:
        yield server


def refusal(answer, path=CHAT, status=400):
    """The sentence of an error in the shape of the API that the path belongs to."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["message"]


# Names of template options


def arguments_to_the_template():
    """Every name that means something to a function between the request and the template."""
    calls = (
        *(write, Prompter._write, jinja2.Template.render),
        *(TokenizerWrapper.apply_chat_template, PreTrainedTokenizerBase.apply_chat_template),
        render_jinja_template,
    )
    parameters = [each for call in calls for each in inspect.signature(call).parameters.values()]
    return {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def test_every_argument_on_the_way_to_the_template_is_reserved():
    """Fails when a new version of transformers has one more."""
    assert arguments_to_the_template() - OPTIONS <= RESERVED


def test_a_template_option_with_a_reserved_name_is_refused(live):
    for name in sorted(RESERVED | {"self", "tokenizer"}):
        options = {"chat_template_kwargs": {name: True}}
        says = refusal(live.post(CHAT, {"messages": TALK, "max_tokens": 1, **options}))
        assert says == f"The template option {name!r} cannot be set; leave it out."


def test_a_template_option_that_makes_the_template_fail_is_refused(live):
    for value in (0, 10**15):  # a division by it, and a range of it that jinja refuses
        body = {"messages": TALK, "max_tokens": 1, "chat_template_kwargs": {"by": value}}
        assert "chat template refuses" in refusal(live.post(CHAT, body))
    body["chat_template_kwargs"] = {"by": 2}
    assert live.post(CHAT, body).status_code == 200


# Numbers


@pytest.mark.parametrize(("path", "body"), PLACES)
def test_a_very_long_number_is_refused_wherever_it_is(live, path, body):
    for number in ("9" * 20, f"-{'9' * 400}", "9" * 5000):  # Python itself parses up to 4,300
        text = json.dumps(body).replace(f'"{NUMBER}"', number)
        says = refusal(live.post(path, text.encode()), path)
        assert re.search("does not fit 64 bits|shorter numbers", says)


def test_numbers_of_64_bits_are_accepted(live):
    for number in (-(2**63), 2**64 - 1, 1e30):
        body = {"messages": TALK, "max_tokens": 1, "unknown": number}
        assert live.post(CHAT, body).status_code == 200, number


# The size of a rotating cache


def test_a_cache_of_one_token_answers(live):
    body = {"messages": TALK, "max_tokens": 8, "keepwarm": {"kv": {"max_kv_size": 1}}}
    for _ in range(2):
        assert live.post(CHAT, body).json()["usage"]["completion_tokens"] > 1


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_cache_size_that_cannot_be_is_refused(live, path):
    for size in (-1, 0, 2**31, 10**30, 1e30, 1.5):
        kv = {"keepwarm": {"kv": {"max_kv_size": size}}}
        refusal(live.post(path, {"messages": TALK, "max_tokens": 1, **kv}), path)


# Token ids


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/lookup/completions"])
def test_a_token_beyond_the_models_vocabulary_is_refused(live, path):
    for token in (-1, N_VOCAB, 2**63):
        says = refusal(live.post(path, {"prompt": [5, token, 6], "max_tokens": 1}))
        assert re.search(rf"token {token}, and the model's tokens are 0 to {N_VOCAB - 1}", says)


def test_a_token_that_only_the_model_has_is_accepted(live):
    """The engine generates such ids, and a client may send them back."""
    for token in (N_TOKENIZER - 1, N_TOKENIZER, N_VOCAB - 1):
        bias = {"logit_bias": {str(token): 100}}
        made = live.post("/v1/completions", {"prompt": [5], "max_tokens": 1, **bias})
        assert made.status_code == 200, made.text
        answer = live.post("/v1/completions", {"prompt": [5, token, 6], "max_tokens": 1})
        assert answer.status_code == 200, answer.text

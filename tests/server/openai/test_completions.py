"""What is special to text completions: several prompts, tokens, echo, scores, a suffix."""

import mlx.core as mx
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from keepwarm import config
from keepwarm.errors import BadField, BadInput
from keepwarm.models.load import load
from keepwarm.prefix.policy import Policy
from keepwarm.server.http import sse
from keepwarm.server.openai import completions
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.text.detokenize import Pieces
from keepwarm.text.request import Delta, Request, Sampling, TokenInfo
from tests.kit.checkpoints import SPECIALS, make_tokenizer, write_checkpoint
from tests.kit.threads import threads_of
from tests.server.apis import events_of
from tests.server.conftest import serve

PROMPTS = ["The quick brown fox", "In 1984 there were"]
LONG = "The fox said that it had seen a dog near the river. " * 4  # more than one slice
SHORT = "A dog 🦊."


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


@pytest.fixture(scope="module")
def model(live):
    return live.host.engine.model


@pytest.fixture(scope="module")
def endless(model):
    return {str(token): -100 for token in model.tokenizer.eos_token_ids}


def ask(client, prompt=PROMPTS[0], **options):
    options = {"max_tokens": 6, **options}
    return client.completions.create(model="tiny", prompt=prompt, **options)


def score(client, prompt=LONG, **options):
    return ask(client, prompt, **{"max_tokens": 3, "echo": True, "logprobs": 2, **options})


def joined(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.text for choice in choices)


# Prompts


def test_text_and_tokens_are_one_prompt(client, model):
    answer, tokens = ask(client), model.tokenizer.encode(PROMPTS[0])
    assert answer.usage.prompt_tokens == len(tokens)
    again = ask(client, tokens)
    assert again.choices[0].text == answer.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1


def test_text_continues_an_agent(client):
    first = ask(client, extra_body={"keepwarm": {"agent": "text"}})
    more = ask(client, " and", extra_body={"keepwarm": {"agent": "text", "continue": True}})
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert known - 1 <= more.keepwarm["continued"] <= known
    assert more.usage.prompt_tokens > known
    known = more.usage.prompt_tokens + more.usage.completion_tokens
    by_id = client.with_options(base_url=f"{client.base_url}agents/text")
    last = ask(by_id, " then")
    assert known - 1 <= last.keepwarm["continued"] <= known
    with pytest.raises(openai.BadRequestError, match="one prompt; send one at a time"):
        ask(by_id, PROMPTS)


def test_several_prompts_answer_in_order(client, model):
    alone = [ask(client, prompt).choices[0].text for prompt in PROMPTS]
    both = ask(client, PROMPTS)
    assert [(choice.index, choice.text) for choice in both.choices] == [*enumerate(alone)]
    assert both.usage.completion_tokens > 6
    chunks = list(ask(client, PROMPTS, stream=True, stream_options={"include_usage": True}))
    assert [joined(chunks, index) for index in range(2)] == alone
    assert chunks[-1].usage.prompt_tokens == both.usage.prompt_tokens
    assert chunks[-1].model_extra["keepwarm"]["recomputed"] == 2
    twice = ask(client, [model.tokenizer.encode(prompt) for prompt in PROMPTS], n=2)
    assert [choice.text for choice in twice.choices] == [text for text in alone for _ in "12"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_of_several_prompts_the_dearest_is_explained(client, stream):
    known, new = (f"{stream} {words} is the question, and what is it?" for words in PROMPTS)
    ask(client, known)
    options = {"stream": stream, "extra_body": {"keepwarm": {"explain": True}}}
    answer = ask(client, [known, new], **options)
    receipt = (list(answer)[-1] if stream else answer).model_extra["keepwarm"]
    assert receipt["miss"]["reason"] in {"new", "diverged"}
    assert receipt["miss"]["position"] < 8, "of the one that was known nearly all is"


def test_choices_of_a_seed_are_the_same_again_and_streamed(client):
    options = {"n": 3, "temperature": 1.0}
    first, again, other = (ask(client, seed=seed, **options) for seed in (7, 7, 8))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 1
    assert [choice.text for choice in again.choices] == texts
    assert [choice.text for choice in other.choices] != texts
    chunks = list(ask(client, seed=7, stream=True, **options))
    assert [joined(chunks, index) for index in range(3)] == texts


def test_echo_is_the_prompt_before_the_answer_or_alone(client):
    plain = ask(client).choices[0].text
    assert ask(client, echo=True).choices[0].text == PROMPTS[0] + plain
    assert joined(ask(client, echo=True, stream=True)) == PROMPTS[0] + plain
    alone = {"echo": True, "max_tokens": 0}
    assert [choice.text for choice in ask(client, PROMPTS, **alone).choices] == PROMPTS
    chunks = list(ask(client, PROMPTS, stream=True, **alone))
    assert [joined(chunks, index) for index in range(2)] == PROMPTS


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 32, 1 << 70])
def test_echo_of_a_token_that_is_none_is_refused_as_without_it(live, token):
    body = {"prompt": [5, token], "max_tokens": 1}
    refused = [live.post("/v1/completions", body | {"echo": echo}) for echo in (False, True)]
    assert [answer.status_code for answer in refused] == [400, 400]
    assert refused[0].json() == refused[1].json()


# Logprobs


def test_logprobs_say_where_each_token_stands_whole_and_streamed(client, endless):
    """Put together, the pieces of a stream are those of a whole answer, offsets included."""
    options = {"logprobs": 2, "logit_bias": endless, "n": 2, "max_tokens": 8}
    whole = ask(client, **options)
    chunks = list(ask(client, stream=True, **options))
    for index, choice in enumerate(whole.choices):
        found = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == index]
        parts = [part for part in found if part]
        assert len(parts) > 1
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 8
        for name in ("tokens", "text_offset"):
            streamed = [value for part in parts for value in getattr(part, name)]
            assert streamed == getattr(choice.logprobs, name)
        streamed = [value for part in parts for value in part.token_logprobs]
        assert streamed == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert all(1 <= len(top) <= 3 for part in parts for top in part.top_logprobs)
        places = zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
        assert all(choice.text.startswith(token, place) for place, token in places)


def test_character_of_several_tokens_is_one_letter_of_the_text(client, model):
    offsets = [0, 1, 5, 6, 7, 7, 7, 7]  # the fox is four tokens
    (choice,) = score(client, SHORT).choices
    assert choice.logprobs.text_offset[:9] == [*offsets, len(SHORT)]
    infos = [TokenInfo(token, -0.5) for token in model.tokenizer.encode(SHORT)]
    meta = CompletionMeta("cmpl-1", 1700000000, "tiny")
    stream = completions.TextStream(meta, [""], False, Pieces(model.tokenizer))
    parts = (infos[:1], infos[1:7], infos[7:])  # as the engine has it: whole characters
    sent = b"".join(stream.event(Delta(0, "x", tokens=tuple(part))) for part in parts)
    found = [event["choices"][0]["logprobs"] for event in events_of(sent.decode())]
    assert [place for each in found for place in each["text_offset"]] == offsets


def test_taken_token_is_among_the_likeliest(client):
    """As at OpenAI, also where none of the others are asked for."""
    logprobs = ask(client, max_tokens=3, logprobs=0).choices[0].logprobs
    taken = zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    assert logprobs.top_logprobs == [{name: logprob} for name, logprob in taken]


# `echo` with `logprobs`: the tokens of a prompt are scored, whatever of it is cached


def scores_of(model, tokens):
    """By one forward pass."""
    logits = model.module(mx.array([tokens]))[0].astype(mx.float32)
    return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()


def test_scores_of_a_prompt_are_those_of_a_plain_forward_pass(client, model):
    score(client, logprobs=None, max_tokens=1)  # now the prompt is cached
    answer = score(client)
    choice, tokens = answer.choices[0], model.tokenizer.encode(LONG)
    logprobs = choice.logprobs
    assert len(logprobs.token_logprobs) == len(tokens) + 3
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    rows = scores_of(model, tokens)
    expected = [row[token] for row, token in zip(rows, tokens[1:], strict=False)]
    assert logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-3)
    tops = [max(top.values()) for top in logprobs.top_logprobs[1 : len(tokens)]]
    assert tops == pytest.approx([max(row) for row in rows[:-1]], abs=1e-3)
    assert {len(top) for top in logprobs.top_logprobs[1:]} <= {1, 2, 3}  # and the one taken
    for name, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(name)
    receipt = answer.model_extra["keepwarm"]
    assert (receipt["scored"], receipt["recomputed"]) == (len(tokens), len(tokens))
    assert receipt["reused"] == {}


@pytest.mark.parametrize("n_tokens", [1, 2, 65, 80, 129])
def test_prompt_whose_last_slice_is_one_token_is_scored(client, n_tokens):
    (choice,) = score(client, [5 + n for n in range(n_tokens)], max_tokens=0).choices
    assert len(choice.logprobs.token_logprobs) == n_tokens


def test_scored_prompt_is_not_kept(client):
    prompt = "Nobody has asked this before, and it is long enough to be kept. " * 6
    score(client, prompt)
    assert score(client, prompt, logprobs=None).model_extra["keepwarm"]["reused"] == {}


@pytest.mark.parametrize("prompt", [SHORT, [SHORT, "Another prompt"]])
def test_stream_of_a_scored_prompt_says_the_same(client, prompt):
    whole = score(client, prompt, n=2, seed=1)
    texts, scores = {}, {}
    for chunk in score(client, prompt, n=2, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            found = choice.logprobs.token_logprobs if choice.logprobs else []
            scores.setdefault(choice.index, []).extend(found)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert scores.keys() == texts.keys()
    for choice in whole.choices:
        assert scores[choice.index][0] is None
        expected = choice.logprobs.token_logprobs[1:]
        assert scores[choice.index][1:] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_scores_are_written_off_the_event_loop(client, monkeypatch, stream):
    names = threads_of(monkeypatch, completions, "prompt_logprobs")
    monkeypatch.setattr(sse, "MANY_LOGPROBS", 0)
    list(score(client, stream=stream))
    (name,) = names
    assert name.startswith("keepwarm-prepare")


def test_prompt_that_may_be_restored_cannot_be_scored():
    with pytest.raises(BadInput, match="NO_STORE"):
        Request(prompt="x", score_prompt=True, sampling=Sampling(top_logprobs=0))
    with pytest.raises(BadInput, match="top_logprobs"):
        Request(prompt="x", score_prompt=True, policy=Policy.NO_STORE)


# A suffix

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_suffix_is_written_as_the_model_wants_it(tmp_path):
    tokenizer = make_tokenizer(specials=(*SPECIALS, *FIM))
    checkpoint = write_checkpoint(tmp_path / "model", tokenizer=tokenizer)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    with serve(load(str(checkpoint), settings), settings) as live, live.openai() as client:
        made = ask(client, "One", suffix="three", echo=True)
        written = ask(client, f"{FIM[0]}One{FIM[1]}three{FIM[2]}")
        with pytest.raises(openai.BadRequestError, match="send text"):
            ask(client, [5, 6], suffix="three")
    assert made.usage.prompt_tokens == written.usage.prompt_tokens
    assert made.choices[0].text == "One" + written.choices[0].text


def test_suffix_is_refused_with_its_reason(client):
    with pytest.raises(openai.BadRequestError, match="which this model lacks") as refused:
        ask(client, "One", suffix="three")
    assert "raw_special_tokens" not in str(refused.value)
    backend = make_tokenizer(specials=(*SPECIALS, *FIM))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert completions.required_fill_in(tokenizer, config.load({})) == FIM
    with pytest.raises(BadField, match="the setting raw_special_tokens keeps them out") as refused:
        completions.required_fill_in(tokenizer, config.load({}, raw_special_tokens=False))
    assert "lacks" not in str(refused.value)

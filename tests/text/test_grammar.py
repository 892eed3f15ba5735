"""A constrained answer follows its format, whatever the model prefers."""

import json
import re
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

import keepwarm
from keepwarm.engine.sampling import Sampler, sample
from keepwarm.errors import BadInput
from keepwarm.kv import make_caches
from keepwarm.text import grammar
from keepwarm.text.detokenize import decode
from keepwarm.text.grammar import ANY_OBJECT, MAX_COMPILED, Grammars
from keepwarm.text.request import Format, Sampling
from tests.kit.checkpoints import write_checkpoint

N_PADDED = 37  # ids of the model that the tokenizer does not have
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
ANY = Format(json=True)
WEATHER = Format(grammar='start: "It is " ("sunny" | "raining") /[.!]/')


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return keepwarm.load(str(write_checkpoint(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def n_vocab(model):
    return model.config["vocab_size"] + N_PADDED


@pytest.fixture(scope="module")
def grammars(model, n_vocab):
    return Grammars(model.tokenizer, n_vocab, model.tokenizer.eos_token_ids)


def encode(model, text):
    return model.tokenizer.encode(text, add_special_tokens=False)


def answers(model, samplers, max_tokens):
    """The answer tokens of all samplers, decoded in one batch. The padded ids get higher logits
    than every real token."""
    stops, caches = model.tokenizer.eos_token_ids, make_caches(model.module)
    tokens = mx.full((len(samplers), 1), 5, mx.uint32)
    said, going = [[] for _ in samplers], set(range(len(samplers)))
    for _ in range(max_tokens):
        logits = model.module(tokens, cache=caches)[:, -1, :]
        logits = mx.concatenate([logits, mx.full((len(samplers), N_PADDED), 50.0)], axis=-1)
        rows = [c.adjust(logits[i : i + 1]) for i, c in enumerate(samplers)]
        chosen = sample(samplers, mx.concatenate(rows))
        for i, token in enumerate(chosen.tolist()):
            if i in going and token not in stops:
                said[i].append(token)
                samplers[i].accept(token)
            if token in stops or samplers[i].is_finished:
                going.discard(i)
        if not going:
            break
        tokens = mx.minimum(chosen, model.config["vocab_size"] - 1)[:, None]
    return said, going


def run(model, grammars, wanted, n_answers, max_tokens, after=(), **wishes):
    n_vocab = model.config["vocab_size"] + N_PADDED
    matcher = grammars.compile(wanted, after)
    samplers = [
        Sampler(
            Sampling(temperature=1.5, seed=seed, **wishes),
            n_vocab,
            grammar=matcher.copy(),
            stop_tokens=model.tokenizer.eos_token_ids,
        )
        for seed in range(n_answers)
    ]
    return answers(model, samplers, max_tokens)


def texts_of(model, said):
    return [decode(model.tokenizer, tokens) for tokens in said]


def check_person(value):
    assert list(value) == ["name", "age", "kind", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("cat", "dog", None)
    assert 1 <= len(value["tags"]) <= 3
    assert {type(tag) for tag in value["tags"]} == {bool}


def test_a_random_model_at_high_temperature_keeps_to_the_schema(model, grammars):
    said, unfinished = run(model, grammars, Format(json=True, schema=PERSON), 8, 1000)
    texts = texts_of(model, said)
    for i, text in enumerate(texts):
        if i not in unfinished:
            check_person(json.loads(text))
    assert not unfinished
    assert len(set(texts)) > 6


def test_without_a_grammar_the_same_model_says_no_json(model):
    """Control: it is the grammar that makes the answer JSON."""
    samplers = [Sampler(Sampling(temperature=1.5, seed=i), 0) for i in range(30)]
    logits = model.module(mx.full((30, 1), 5, mx.uint32))[:, -1, :]
    texts = [decode(model.tokenizer, [token]) for token in sample(samplers, logits).tolist()]
    assert sum(text.startswith("{") for text in texts) < 3


def allowed_by(matcher):
    return set(np.flatnonzero(matcher.mask()).tolist())


def feed(matcher, tokens):
    for token in tokens:
        assert token in allowed_by(matcher)
        matcher.advance(token)


def test_the_answer_is_finished_as_soon_as_nothing_can_follow(model, grammars):
    matcher = grammars.compile(Format(schema=PERSON))
    feed(matcher, encode(model, '{"name": "Ada", "age": 36, "kind": null, "tags": [true]'))
    assert not matcher.finished
    feed(matcher, encode(model, "}"))
    assert matcher.finished
    assert allowed_by(matcher) == model.tokenizer.eos_token_ids


def test_where_more_could_follow_the_model_itself_ends_it(model, grammars):
    matcher = grammars.compile(Format(grammar="start: /[ab]+/"))
    stop = next(iter(model.tokenizer.eos_token_ids))
    assert stop not in allowed_by(matcher)
    feed(matcher, encode(model, "ab"))
    assert not matcher.finished
    assert stop in allowed_by(matcher)
    matcher.advance(stop)
    assert matcher.finished


def test_padded_ids_are_never_allowed(model, grammars, n_vocab):
    anything = grammars.compile(Format(grammar=r"start: /(?s:.)*/"))
    assert anything.mask().shape == (n_vocab,)
    assert max(allowed_by(anything)) < model.config["vocab_size"]
    assert max(allowed_by(grammars.compile(ANY, after=[9]))) < model.config["vocab_size"]


def test_a_tokenizer_larger_than_the_model(model):
    small = model.config["vocab_size"] - 11
    matcher = Grammars(model.tokenizer, small, model.tokenizer.eos_token_ids).compile(ANY)
    assert matcher.mask().shape == (small,)
    feed(matcher, encode(model, '{"a"'))


def test_several_stop_tokens(model, n_vocab):
    matcher = Grammars(model.tokenizer, n_vocab, {0, 2}).compile(Format(grammar='start: "a"*'))
    assert {0, 2} <= allowed_by(matcher)


def test_whitespace_is_bounded(model, grammars):
    """A model that prefers spaces must write something else after a while."""
    matcher, space = grammars.compile(ANY), encode(model, " ")[0]
    feed(matcher, encode(model, "{"))
    n_spaces = 0
    while space in allowed_by(matcher):
        matcher.advance(space)
        n_spaces += 1
    assert n_spaces == 64
    feed(matcher, encode(model, '"a":1}'))


def test_keywords_that_no_grammar_expresses_are_ignored_and_named(model, grammars):
    schema = {"type": "array", "items": {"format": "nobody's", "type": "string"}}
    matcher = grammars.compile(Format(schema={**schema, "uniqueItems": True}))
    assert matcher.ignored == ("uniqueItems", "format")
    feed(matcher, encode(model, '["a","a"]'))
    assert grammars.compile(Format(schema=PERSON)).ignored == ()


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}}
NAME = {"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        (AGE, '{"age":1}', True),
        (AGE, '{"invented":1}', False),
        (AGE | {"additionalProperties": True}, '{"invented":1}', True),
        (ANY_OBJECT, '{"invented":1}', True),
        ({"type": "array", "items": AGE}, '[{"invented":1}]', False),
        ({"anyOf": [AGE, NAME]}, '{"name":"x","invented":1}', False),
        (AGE | {"anyOf": [NAME]}, '{"age":1,"name":"x"}', True),
        ({"allOf": [AGE, NAME]}, '{"age":1,"name":"x"}', True),
        (AGE | {"required": ["other"]}, '{"other":1}', True),
        (AGE | {"oneOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": NAME}}, '{"name":"x"}', True),
        ({"anyOf": [AGE], "required": ["other"]}, '{"other":1}', True),
    ],
)
def test_no_keys_are_invented_in_an_answer(model, grammars, schema, text, fits):
    matcher = grammars.compile(Format(schema=schema))
    for token in encode(model, text):
        if token not in allowed_by(matcher):
            assert not fits
            return
        matcher.advance(token)
    assert fits


# Reasoning before the answer


def test_the_grammar_begins_after_the_thoughts(model, grammars):
    end = encode(model, "</think>")
    assert len(end) > 1
    matcher = grammars.compile(ANY, after=end)
    feed(matcher, [*encode(model, "Hmm, the quick fox <"), *end[:-1], *encode(model, "no")])
    assert not matcher.finished
    assert not allowed_by(matcher) & model.tokenizer.eos_token_ids  # the answer has not begun
    feed(matcher, end)
    assert allowed_by(matcher) == set(encode(model, "{")) | {
        i for i in range(320) if decode(model.tokenizer, [i]).startswith('{"')
    }
    feed(matcher, encode(model, "{}"))
    assert matcher.finished


# Drafts


def test_a_draft_ends_where_it_is_not_allowed_and_what_must_come_is_one(model, grammars):
    forced, rest = encode(model, "It is "), encode(model, "sunny")
    matcher = grammars.compile(WEATHER, after=[9])
    assert matcher.fitted([5, 6]) == [5, 6]  # the grammar has not begun
    matcher.advance(9)
    assert matcher.fitted([]) == matcher.fitted([5, 6]) == forced[: len(matcher.fitted([]))] != []
    assert matcher.fitted([*forced, *rest, 9, 9]) == [*forced, *rest]
    feed(matcher, [*forced, *rest])
    assert matcher.fitted([9]) == []  # ! or .
    feed(matcher, encode(model, "!"))
    assert matcher.fitted([9]) == []
    assert matcher.finished


def test_what_must_come_is_found_once_and_only_of_tokens_that_the_model_has(
    model, grammars, n_vocab, monkeypatch
):
    forced = encode(model, "It is ")[:3]
    matcher = grammars.compile(WEATHER)
    found = [*forced, n_vocab, 5]

    class Forcing:
        def compute_ff_tokens(self):
            return found

        def validate_tokens(self, tokens):
            return 0

        def consume_token(self, token):
            found.clear()

    monkeypatch.setattr(matcher, "_matcher", Forcing())
    assert matcher.fitted([]) == forced
    matcher.advance(forced[0])
    assert matcher.fitted([]) == forced[1:]
    matcher.advance(9)
    assert matcher.fitted([]) == []


# Copies and the cache of compiled grammars


def test_a_copy_is_independent(model, grammars):
    matcher = grammars.compile(WEATHER, after=[9, 10])
    matcher.advance(9)
    twin = matcher.copy()
    matcher.advance(11)
    twin.advance(10)
    feed(twin, encode(model, "It is"))
    other = twin.copy()
    feed(twin, encode(model, " sunny!"))
    feed(other, encode(model, " raining"))
    assert (matcher.finished, twin.finished, other.finished) == (False, True, False)


def test_a_grammar_is_compiled_once_and_the_oldest_is_dropped(model, n_vocab):
    grammars, compiled = Grammars(model.tokenizer, n_vocab, [2]), []
    for _ in range(3):
        grammars.compile(ANY, trial=compiled.append)
        grammars.compile(Format(json=True, schema=PERSON), trial=compiled.append)
    assert len(compiled) == 2
    for i in range(MAX_COMPILED - 1):
        grammars.compile(Format(grammar=f'start: "{i}"'))
    grammars.compile(Format(json=True, schema=PERSON), trial=compiled.append)
    assert len(compiled) == 2
    grammars.compile(ANY, trial=compiled.append)
    assert len(compiled) == 3


# Formats that are refused


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Format(schema={"type": "objekt"}), "Invalid type: objekt"),
        (Format(schema={"not": {"type": "string"}}, strict=True), 'Unimplemented keys: ["not"]'),
        (Format(schema={"$ref": "http://example.com/a"}), "does not fetch"),
        (Format(schema={"type": "string", "pattern": "("}), "unclosed group"),
        (Format(schema={"type": "integer", "minimum": 5, "maximum": 1}), "Unsatisfiable"),
        (Format(schema={"enum": [{1, 2}]}), "not valid JSON"),
        (Format(schema={"const": float("nan")}), "not valid JSON"),
        (Format(grammar="start: foo"), 'unknown name: "foo"'),
        (Format(grammar="nonsense"), "Expected token"),
        (Format(grammar=""), "Empty grammar"),
        (Format(json=True, grammar='start: "a"'), "choose one"),
    ],
    ids=str,
)
def test_a_bad_format_is_refused_with_the_reason_in_one_sentence(grammars, wanted, reason):
    with pytest.raises(BadInput, match=re.escape(reason)) as refused:
        grammars.compile(wanted)
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(".")


def test_a_format_is_refused_beyond_its_number_of_characters(grammars, monkeypatch):
    assert grammars.compile(Format()) is None
    limit = partial(monkeypatch.setattr, grammar, "MAX_CHARACTERS")
    limit(0)
    with pytest.raises(BadInput, match="send at most 0") as refused:
        grammars.compile(WEATHER)
    n_characters = int(re.search(r"is (\d+) characters long", str(refused.value))[1])
    limit(n_characters)
    assert grammars.compile(WEATHER)
    limit(n_characters - 1)
    with pytest.raises(BadInput, match=f"send at most {n_characters - 1}"):
        grammars.compile(WEATHER)


def test_a_token_that_the_grammar_forbids_ends_this_answer_only(model, grammars, n_vocab):
    bad, good = (Sampler(Sampling(), n_vocab, grammar=grammars.compile(WEATHER)) for _ in range(2))
    bad.accept(encode(model, "x")[0])
    good.accept(encode(model, "It")[0])
    logits = mx.zeros((1, n_vocab))
    with pytest.raises(BadInput, match=r"cannot follow its format .*x.*\); change the format\.$"):
        bad.adjust(logits)
    assert not bad.is_finished
    assert good.adjust(logits).max().item() == 0


def test_a_tokenizer_that_does_not_support_grammars(model):
    class Slow:
        pass

    with pytest.raises(BadInput, match="not a fast tokenizer"):
        Grammars(Slow(), 100, [2]).compile(ANY)


def test_a_sampler_masks_after_bias_and_penalties(model, grammars, n_vocab):
    wishes = Sampling(logit_bias={5: 100.0}, presence_penalty=1.0, temperature=1.0)
    sampler = Sampler(replace(wishes, seed=0), n_vocab, grammar=grammars.compile(ANY))
    assert not sampler.is_plain
    scores = np.array(sampler.adjust(mx.zeros((1, n_vocab)))[0])
    assert np.isneginf(scores[5])
    assert set(np.flatnonzero(np.isfinite(scores)).tolist()) == allowed_by(grammars.compile(ANY))

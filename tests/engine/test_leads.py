"""What a model writes before an answer that follows a format: thoughts, the header of a channel."""

import json
from dataclasses import replace

import pytest
from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

import keepwarm
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text.prepare import Preparer
from keepwarm.text.request import Format, Request, Sampling
from tests.kit.checkpoints import make_tokenizer, write_checkpoint
from tests.kit.engines import engine_on
from tests.kit.runs import FedCounter
from tests.text.formats import HARMONY_TOKENS

CAT = Format(schema={"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}})
THOUGHT = "<|channel|>analysis<|message|>A cat?<|end|><|start|>assistant"


def model_with(directory, marks):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return keepwarm.load(str(write_checkpoint(directory, tokenizer=tokenizer)))


@pytest.fixture(scope="module")
def channels(tmp_path_factory):
    """A model that speaks in the channels of gpt-oss."""
    marks = [f"<|{name}|>" for name in HARMONY_TOKENS]
    return model_with(tmp_path_factory.mktemp("channels"), marks)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model that opens its thoughts itself, if it likes."""
    return model_with(tmp_path_factory.mktemp("thinker"), ["<think>", "</think>"])


def prepared_by(model, **wishes):
    wishes = {"messages": [{"role": "user", "content": "Which?"}], "format": CAT, **wishes}
    return Preparer(model, model.config["vocab_size"], RecentPrompts()).prepare(Request(**wishes))


def fits(model, text, **wishes):
    """Whether this can be a whole answer."""
    matcher = prepared_by(model, **wishes).new_matcher()
    for token in model.tokenizer.encode(text, add_special_tokens=False):
        if not matcher.mask()[token].item():
            return False
        matcher.advance(token)
    return matcher.finished


def test_an_answer_in_channels_follows_its_format_in_the_last_of_them(channels):
    answer = '<|channel|>final<|message|>{"kind": "cat"}'
    assert fits(channels, answer)
    assert fits(channels, THOUGHT + answer)
    assert not fits(channels, '{"kind": "cat"}')
    assert not fits(channels, "<|channel|>final<|message|>A cat.")
    assert not fits(channels, THOUGHT.replace("analysis", "final") + answer)


def test_a_model_that_speaks_in_channels_is_heard(channels, tmp_path):
    """However it begins, the text of its answer is what the format asks for."""
    end = channels.tokenizer.convert_tokens_to_ids("<|end|>")
    wishes = Sampling(temperature=1.0, seed=3, max_tokens=200, logit_bias={end: 20.0})
    talk = [{"role": "user", "content": "Which?"}]
    counted = replace(channels, module=FedCounter(channels.module))
    with engine_on(counted, tmp_path) as engine:
        asked = Request(messages=talk, format=CAT, sampling=wishes, n=4)
        for choice in engine.submit(asked).result().choices:
            assert json.loads(choice.text).get("kind", "cat") in ("cat", "dog")
            assert choice.reason == "stop"


def test_where_mlx_lm_knows_a_header_it_comes_first(tmp_path):
    """Muse Spark begins its answers so, for any recipient."""
    model = model_with(tmp_path, [])
    muse = TokenizerWrapper(model.tokenizer._tokenizer, response_format=RESPONSE_FORMAT)
    addressed = replace(model, tokenizer=muse)
    answer = '{"kind": "cat"}'
    assert not fits(addressed, answer)
    assert fits(addressed, f"to=user<|message|>{answer}")
    assert prepared_by(addressed).first_segment == "header"


def test_a_model_may_think_before_it_follows_a_format(thinker):
    answer = '{"kind": "dog"}'
    assert fits(thinker, answer)
    assert fits(thinker, f"<think>A cat? {{}}\n</think>{answer}")
    assert not fits(thinker, f"Hm. {answer}")
    wanted = Format(grammar='start: "a" thoughts\nthoughts: "b"')  # names of its own
    assert fits(thinker, "<think>Hm.</think>ab", format=wanted)


def test_who_is_told_not_to_think_does_not(thinker, channels):
    answer = '{"kind": "dog"}'
    assert fits(thinker, answer, thinking=False)
    assert not fits(thinker, f"<think>Hm.</think>{answer}", thinking=False)
    final = f"<|channel|>final<|message|>{answer}"
    assert fits(channels, final, thinking=False)
    assert not fits(channels, THOUGHT + final, thinking=False)


def test_a_raw_prompt_is_gone_on_with_as_it_stands(thinker, channels):
    """Anything before the answer belongs in a raw prompt."""
    for model in (thinker, channels):
        assert fits(model, '{"kind": "cat"}', messages=None, prompt="Which?")
    assert not fits(thinker, '<think></think>{"kind": "cat"}', messages=None, prompt="Which?")

"""What the small models learn from, and that they stay small. Training itself needs torch."""

import argparse
import inspect
import json

import numpy as np
import pytest
from benchmarks.training import chat, tokenizer
from benchmarks.training.corpus import END_OF_TEXT, File, read_files, tokenized
from benchmarks.training.kinds import KINDS, MAX_PARAMETERS, VOCABULARY, config_of
from benchmarks.training.samples import AGAIN, FIELD, N_QUESTIONS, Samples
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from keepwarm.text.tools import call_text, tool_block, write_tools_as_text

N_TOKENS = 1200
TEXT = (
    "def read(path: str) -> bytes:\n    return open(path).read()  # whole\n\n\nvalue = read('a')\n"
)


@pytest.fixture(scope="module")
def words():
    return tokenizer.load()


@pytest.fixture(scope="module")
def samples(words):
    files = [
        File("a.py", inspect.getsource(argparse)),
        File("b.py", inspect.getsource(json.decoder)),
        File("c.md", "Some words. " * 90),
    ]
    return Samples(tokenized(files, words).train, words)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def answer_runs(sample):
    """Start and end of each answer."""
    edges = np.flatnonzero(np.diff(np.r_[0, sample.answers.astype(int), 0]))
    return edges.reshape(-1, 2)


def places(tokens, wanted):
    """Where a run of tokens begins."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(wanted))
    return np.flatnonzero((windows == wanted).all(axis=1))


# -- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "copy", "needles", "tools", "mixed"])
def test_every_sample_has_the_wanted_length(samples, rng, name):
    for _ in range(20):
        sample = getattr(samples, name)(rng, N_TOKENS)
        assert {len(part) for part in sample} == {N_TOKENS}
        assert sample.tokens.min() >= 0
        assert sample.tokens.max() < VOCABULARY
        assert sample.weights[sample.answers].all()


@pytest.mark.parametrize("name", ["copy_of_random", "copy_of_code"])
def test_a_copy_is_what_stands_before(samples, rng, name):
    for _ in range(10):
        tokens, weights, _ = sample = getattr(samples, name)(rng, N_TOKENS, 500)
        [(start, end)] = answer_runs(sample)
        assert end - start == 500
        first = places(tokens[:start], tokens[start:end])
        assert len(first) == 1
        before = weights[first[0] : first[0] + 500]
        assert set(before) == ({0.0} if name == "copy_of_random" else {1.0})


def test_a_copy_is_asked_for_in_two_ways(samples, rng):
    copies = [samples.copy_of_random(rng, N_TOKENS, 500).tokens for _ in range(20)]
    assert {AGAIN in tokens for tokens in copies} == {True, False}


def test_needles_in_random_tokens_stand_once_behind_their_key(samples, rng):
    sample = samples.needles_in_random(rng, N_TOKENS)
    runs = answer_runs(sample)
    assert len(runs) == N_QUESTIONS // 2
    hay_end = runs[0][0] - 3
    for start, end in runs:
        asked = sample.tokens[start - 3 : end]
        assert asked[0] == FIELD
        assert len(places(sample.tokens[:hay_end], asked)) == 1
    assert not sample.weights[:hay_end].any()


def test_needles_in_text_stand_once_before_the_question(samples, words, rng):
    forms = set()
    for _ in range(20):
        sample = samples.needles_in_text(rng, N_TOKENS)
        text = words.decode(sample.tokens.tolist(), skip_special_tokens=False)
        hay, *_ = text.split("<|im_end|>\n<|im_start|>assistant")
        for start, end in answer_runs(sample):
            value = words.decode(sample.tokens[start:end].tolist())
            assert len(value) == 6
            assert hay.count(value) == 1
            said = text[: text.rindex(value)].rpartition("\n")[2]
            assert f"\n{said}{value}" in hay
            forms.add(said[:1] if said[:1] in "{T" else "=")
    assert forms == {"T", "=", "{"}


def test_needles_lie_everywhere(samples, rng):
    """First and last quarter: a model that looks only back a little would not find all."""
    found = []
    for _ in range(20):
        sample = samples.needles_in_random(rng, N_TOKENS)
        for start, end in answer_runs(sample):
            found.append(places(sample.tokens[: start - 3], sample.tokens[start - 3 : end])[0])
    assert min(found) < N_TOKENS // 4
    assert max(found) > N_TOKENS * 3 // 4


def test_tool_calls_write_what_was_read(samples, words, rng):
    names = set()
    for _ in range(30):
        sample = samples.tools(rng, N_TOKENS)
        text = words.decode(sample.tokens.tolist(), skip_special_tokens=False)
        read = text.split("<tool_response>\n")[-1].split("\n</tool_response>")[0]
        [(start, end)] = answer_runs(sample)
        answer = words.decode(sample.tokens[start:end].tolist())
        if answer.startswith("```"):
            assert answer == f"```python\n{read}\n```"
            continue
        made = json.loads(answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        names.add(made["name"])
        old, new = read.split("\n"), made["arguments"].get("content", "").split("\n")
        if made["name"] == "write_file":
            assert len(old) == len(new)
            [(before, after)] = [pair for pair in zip(old, new, strict=True) if len({*pair}) == 2]
            assert after.startswith(f"{before}  # ")
            assert f"`{before.strip()}`" in text  # the line that was asked for
        else:
            assert made["arguments"]["old"] in read
    assert names == {"write_file", "edit_file"}


# -- the chat format ------------------------------------------------------------------------------


def test_tools_are_written_as_keepwarm_writes_them():
    assert chat.tool_block() == tool_block(chat.TOOLS)
    assert chat.call("read_file", path="ä") == call_text("read_file", '{"path": "ä"}')
    [message] = write_tools_as_text([{"role": "tool", "content": "x"}], [])
    assert chat.response("x") == message["content"]


# -- tokenizer and models -------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXT, "naïve 你好 \t\r\n 12345", "<|im_start|>user\n<|im_end|>"])
def test_tokens_are_the_text(words, text):
    ids = words.encode(text).ids
    assert words.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_default_models_numbers(words):
    assert words.get_vocab_size() == VOCABULARY
    assert [words.token_to_id(text) for text in tokenizer.SPECIAL] == list(range(17))
    assert words.token_to_id("<|endoftext|>") == END_OF_TEXT


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_small(kind):
    config = config_of(kind)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    if kind == "window":
        model.sanitize({})  # which ties the output to the embedding
    assert sum(value.size for _, value in tree_flatten(model.parameters())) < MAX_PARAMETERS


def test_files_are_read_once_and_in_one_order(tmp_path):
    for name in ("a.py", "b.py", "c.txt", "d.bin", "LICENSE"):
        (tmp_path / name).write_text(TEXT * 4 + ("b" if name == "c.txt" else ""))
    names = [file.name for file in read_files([tmp_path], 10_000)]
    assert len(names) == 2
    assert "c.txt" in names
    assert names == [file.name for file in read_files([tmp_path], 10_000)]

"""Rows that join and leave a batch generate the same tokens as alone."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm import kv
from keepwarm.engine.batch import Batch, Row
from keepwarm.engine.sampling import Sampler
from keepwarm.text.request import Delta, Sampling
from tests.kit.engines import ask, engine_on
from tests.kit.models import LAYER_KINDS
from tests.kit.runs import FedCounter, cold, continue_from, prefill, prompt_of

VOCABULARY = 128


def row_of(tokens, **wishes) -> Row:
    return Row(tokens, Sampler(Sampling(**wishes), VOCABULARY, tokens), top_logprobs=None)


def join(batch: Batch, module, prompt, **wishes) -> Row:
    row, caches = row_of(prompt, **wishes), make_prompt_cache(module)
    prefill(module, caches, prompt[:-1])
    logits = module(mx.array([[prompt[-1]]]), cache=caches)[:, -1, :]
    kv.evaluate(caches)
    batch.join(row, caches, row.sample_first(logits))
    return row


def feed(batch: Batch) -> None:
    batch.feed()
    for row, token in batch.emit():
        row.append(token)


def step(batch: Batch) -> None:
    feed(batch)
    assert not batch.sample()


def said(row: Row, prompt) -> list[int]:
    return row.tokens[len(prompt) :]


@pytest.mark.parametrize("architecture", LAYER_KINDS)
def test_rows_come_and_go(tiny_model, architecture):
    """At every step a row may join or leave; each row's tokens are a cold run's, and the caches
    it leaves with go on as if it had been alone."""
    module = tiny_model(architecture)
    chance = random.Random(3)
    batch: Batch[Row] = Batch(module)
    prompts = [prompt_of(chance.randint(5, 60), seed) for seed in range(7)]
    waiting, inside, gone = list(range(7)), {}, {}
    while waiting or inside:
        if waiting and (not inside or chance.random() < 0.5):
            number = waiting.pop(0)
            inside[number] = join(batch, module, prompts[number])
        step(batch)
        leaving = [n for n, row in inside.items() if len(said(row, prompts[n])) >= 3 + n]
        # Between two steps the current token is chosen and not fed: it is nowhere yet.
        caches = batch.leave([inside[n] for n in leaving])
        for n, own in zip(leaving, caches, strict=True):
            gone[n] = (inside.pop(n), own)
    for n, (row, caches) in gone.items():
        run = cold(module, prompts[n], 3 + n)
        assert said(row, prompts[n]) == run.tokens
        assert kv.token_count(caches) in (None, len(row.tokens))
        after = continue_from(module, caches, [1, 2, 3], 3)
        assert after.tokens == continue_from(module, run.cache, [1, 2, 3], 3).tokens
    assert len(gone) == 7


def test_logprobs_of_all_rows_come_to_the_host_together(tiny_model):
    """After each copy the engine's thread waits for its turn among all that run Python."""
    batch: Batch[Row] = Batch(tiny_model("llama"))
    rows = [join(batch, tiny_model("llama"), prompt_of(5 + seed, seed)) for seed in range(3)]
    for row in rows[:2]:
        row.top_logprobs = 3
    feed(batch)
    assert not batch.sample()
    (first, second), silent = [row._logprobs for row in rows[:2]], rows[2]._logprobs
    assert first[0] is second[0]
    assert silent is None
    told = {row: row.append(token) for row, token in batch.emit()}
    assert [told[row].top[0].token for row in rows[:2]] == [told[row].token for row in rows[:2]]
    assert not told[rows[2]].top


def test_a_lone_row_keeps_its_caches(tiny_model):
    """Nothing is copied or padded while there is no neighbour."""
    module = tiny_model("llama")
    batch: Batch[Row] = Batch(module)
    row = join(batch, module, prompt_of(10))
    before = batch.peek(row)
    step(batch)
    assert batch.peek(row) is before
    join(batch, module, prompt_of(20, 1))
    assert batch.peek(row) is not before


def test_looking_at_a_row_changes_nothing(tiny_model):
    module = tiny_model("gemma3_text")
    batch: Batch[Row] = Batch(module)
    prompts = [prompt_of(40), prompt_of(20, 1)]
    rows = [join(batch, module, prompt) for prompt in prompts]
    for _ in range(6):
        step(batch)
        for row in rows:
            assert kv.token_count(batch.peek(row)) == len(row.tokens)
    for row, prompt in zip(rows, prompts, strict=True):
        assert said(row, prompt) == cold(module, prompt, 6).tokens


def test_rows_between_feed_and_sample(tiny_model):
    """That is when rows leave; the others sample from their own logits."""
    module = tiny_model("qwen3_next")
    batch: Batch[Row] = Batch(module)
    prompts = [prompt_of(12), prompt_of(20, 1), prompt_of(7, 2)]
    rows = [join(batch, module, prompt) for prompt in prompts]
    feed(batch)
    (caches,) = batch.leave([rows[1]])
    assert continue_from(module, caches, [5], 2).tokens
    batch.sample()
    for _ in range(3):
        step(batch)
    for i in (0, 2):
        assert said(rows[i], prompts[i]) == cold(module, prompts[i], 4).tokens


@pytest.mark.parametrize("fed", [False, True])
def test_what_a_disbanded_batch_sampled_is_sampled_again(tiny_model, fed):
    """By the row's key and its place: a seeded answer stays the same, whatever the device left."""
    module = tiny_model("llama")
    prompt = prompt_of(10)
    batch: Batch[Row] = Batch(module)
    row = join(batch, module, prompt, temperature=1.0, seed=4)
    whole: Batch[Row] = Batch(module)
    twin = join(whole, module, prompt, temperature=1.0, seed=4)
    for _ in range(6):
        step(whole)
    step(batch)
    if fed:
        feed(batch)
    else:
        batch._tokens = mx.array([2**31], mx.uint32)  # never written
    assert batch.disband() == [row]
    caches = prefill(module, make_prompt_cache(module), row.tokens[:-1])
    logits = module(mx.array([[row.tokens[-1]]]), cache=caches)[:, -1, :]
    again: Batch[Row] = Batch(module)
    again.join(row, caches, row.sample_first(logits))
    while len(row.tokens) < len(twin.tokens):
        step(again)
    assert row.tokens == twin.tokens


@pytest.mark.parametrize("step", ["filter_rows", "array"])
def test_a_batch_that_some_rows_could_not_leave_still_has_all(tiny_model, monkeypatch, step):
    """It is disbanded then: a row that it no longer had would never end."""
    module = tiny_model("llama")
    batch: Batch[Row] = Batch(module)
    rows = [join(batch, module, prompt_of(10, seed)) for seed in range(2)]

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(kv if step == "filter_rows" else mx, step, fail)
    with pytest.raises(MemoryError):
        batch.leave(rows[:1])
    assert batch.rows == rows


class Stuck(Sampler):
    @property
    def is_plain(self) -> bool:
        return False

    def adjust(self, logits: mx.array) -> mx.array:
        raise ValueError("stuck")


def test_a_row_whose_rules_fail_is_named(tiny_model):
    """The other rows go on."""
    module = tiny_model("llama")
    batch: Batch[Row] = Batch(module)
    prompt = prompt_of(15)
    row = join(batch, module, prompt)
    bad = join(batch, module, prompt_of(9, 1))
    bad.sampler = Stuck(Sampling(), VOCABULARY)
    feed(batch)
    failed = batch.sample()
    assert list(failed) == [bad]
    batch.leave([bad])
    for _ in range(3):
        step(batch)
    assert said(row, prompt) == cold(module, prompt, 4).tokens


class Slow(FedCounter):
    """A model that waits in the first decode step until a token was read."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.seen = threading.Event()

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if inputs.shape[1] == 1 and (1, 20) in self.shapes:
            assert self.seen.wait(300)
        return super().__call__(inputs, *args, **kwargs)


def test_a_first_token_does_not_wait_for_the_second(models, tmp_path):
    model = models.of("llama")
    model = replace(model, module=Slow(model.module.model))
    with engine_on(model, tmp_path) as engine:
        for event in engine.submit(ask(prompt_of(20))):
            if isinstance(event, Delta):
                model.module.seen.set()
    assert model.module.seen.is_set()

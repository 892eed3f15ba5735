"""One thread owns the model and its caches, whichever thread submits; text in, text out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import keepwarm
from keepwarm.errors import ContextTooLong
from keepwarm.text.request import Delta, Done, Request, Sampling, Started
from tests.kit.checkpoints import write_checkpoint
from tests.kit.engines import ask, engine_on
from tests.kit.runs import FedCounter, prompt_of

TEXT = "The quick brown fox jumps over the lazy dog while"


class Watched(FedCounter):
    """A model that notes which threads have called it, and with how many rows at most."""

    def __init__(self, model):
        super().__init__(model)
        self.callers = set()

    def __call__(self, inputs, *args, **kwargs):
        self.callers.add(threading.get_ident())
        return super().__call__(inputs, *args, **kwargs)


def test_one_thread_alone_touches_the_batch(models, tmp_path):
    """Many threads ask at once, answers are computed together, and by one owner."""
    model = models.of("llama")
    model = replace(model, module=Watched(model.module.model))
    with engine_on(model, tmp_path) as engine, ThreadPoolExecutor(6) as pool:
        owner = engine.call(threading.get_ident).result()
        model.module.callers.clear()
        requests = [ask(prompt_of(40, seed), 60) for seed in range(6)]
        results = list(pool.map(lambda request: engine.submit(request).result(), requests))
    assert all(len(result.choices[0].tokens) == 60 for result in results)
    assert model.module.callers == {owner}
    assert owner != threading.get_ident()
    assert max(rows for rows, _ in model.module.shapes) > 1


def test_a_text_is_tokenised_and_its_answer_streamed(tmp_path):
    """From a directory and a text; every request has a number of its own."""
    model = keepwarm.load(str(write_checkpoint(tmp_path / "model", n_context=64)))
    model = replace(model, module=FedCounter(model.module))
    model.tokenizer.eos_token_ids = set()
    tokens = model.tokenizer.encode(TEXT)
    with engine_on(model, tmp_path) as engine:
        by_text, by_ids = (
            list(
                engine.submit(
                    Request(prompt=prompt, sampling=Sampling(max_tokens=12, temperature=0))
                )
            )
            for prompt in (TEXT, tokens)
        )
        with pytest.raises(ContextTooLong, match="at most 63"):
            engine.submit(Request(prompt=TEXT * 9))
        numbers = [entry.number for entry in engine.requests()]
    assert isinstance(by_text[0], Started)
    assert isinstance(by_text[-1], Done)
    pieces = [event.text for event in by_text if isinstance(event, Delta)]
    assert len(pieces) > 1
    assert pieces == [event.text for event in by_ids if isinstance(event, Delta)]
    assert by_text[-1].usage.prompt_tokens == len(tokens)
    assert by_ids[-1].usage.cached_tokens == len(tokens) - 1
    assert len(set(numbers)) == 2

"""A cancelled request costs at most one more step, counted where the model is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import Cancelled
from keepwarm.text.request import Request
from tests.kit.engines import ask, engine_on, held
from tests.kit.runs import FedCounter, prompt_of

PATIENCE_S = 300
SLICE = 100
Shape = tuple[int, int]


class Halting(FedCounter):
    """A model that halts in the first call for which `halts_at` is true, until released."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.halts_at: Callable[[Shape], bool] = lambda _: False
        self.halted, self.go_on = threading.Event(), threading.Event()

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out = super().__call__(inputs, *args, **kwargs)
        if not self.halted.is_set() and self.halts_at(self.shapes[-1]):
            self.halted.set()
            assert self.go_on.wait(PATIENCE_S)
        return out


@pytest.fixture
def engine(models, tmp_path) -> Iterator[Engine]:
    model = models.of("llama")
    model = replace(model, module=Halting(model.module.model))
    with engine_on(model, tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = SLICE
        yield engine


def cancelled_at(
    engine: Engine, halts_at: Callable[[Shape], bool], *requests: Request
) -> tuple[list[Answer], list[Shape]]:
    """Cancel the last request during such a call; the other answers, and the calls after it."""
    module = engine.model.module
    with held(engine):
        module.halts_at = halts_at
        *others, leaving = [engine.submit(request) for request in requests]
    assert module.halted.wait(PATIENCE_S)
    n_before = len(module.shapes)
    leaving.cancel()
    module.go_on.set()
    with pytest.raises(Cancelled):
        leaving.result()
    engine.call(lambda: None).result(PATIENCE_S)
    return others, module.shapes[n_before:]


def test_a_prompt_is_prefilled_no_further_than_its_slice(engine):
    """Cancelled in the third of eight slices."""
    module, prompt = engine.model.module, prompt_of(8 * SLICE)
    _, after = cancelled_at(engine, lambda _: len(module.shapes) == 3, ask(prompt, 5))
    assert len(after) <= 1
    assert sum(length for _, length in after) <= SLICE
    read = module.fed
    again = engine.submit(ask(prompt, 1)).result()
    assert 2 * SLICE <= again.receipt.cached_tokens <= read  # what was done is used again


def test_an_answer_goes_on_for_one_token_at_most(engine):
    """Cancelled after some of two thousand tokens."""
    module = engine.model.module
    _, after = cancelled_at(engine, lambda _: len(module.shapes) == 10, ask(prompt_of(20), 2000))
    assert after in ([], [(1, 1)])
    n_calls = len(module.shapes)
    assert engine.submit(ask(prompt_of(30, 7), 3)).result()
    assert len(module.shapes) - n_calls <= 5  # its own: the prompt, three tokens, the last one kept
    assert engine.stats().decoding == 0


def test_a_neighbour_goes_on_alone(engine):
    """The other sequence gets every token, and the cancelled row leaves within a step."""
    requests = ask(prompt_of(20, 1), 40), ask(prompt_of(20, 2), 2000)
    (staying,), after = cancelled_at(engine, lambda shape: shape[0] == 2, *requests)
    assert len(staying.result().choices[0].tokens) == 40
    assert sum(rows > 1 for rows, _ in after) <= 1


def test_the_turn_of_a_row_that_is_being_rebuilt_is_kept(engine):
    """Its batch failed, and it is cancelled while its tokens are computed again."""
    module, said = engine.model.module, []

    def lost(shape: Shape) -> bool:
        if shape[1] == 1 and len(module.shapes) > 220 and not said:
            said.append(len(module.shapes))
            raise RuntimeError("lost")
        return bool(said) and shape[1] > 1

    cancelled_at(engine, lost, ask(prompt_of(200), 2000, agent="ada"))
    engine.wait_until_saved()
    agent = engine.store.on_disk.agents.show("ada")
    assert agent.head.n_tokens > 200

"""A long restore does not block other requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

from keepwarm.cache.restore.loading import Reader
from keepwarm.engine.admission import kv_bytes
from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import Lane
from keepwarm.errors import Cancelled
from keepwarm.kv.layout import probe
from keepwarm.text.request import Delta
from tests.kit.engines import Exam, Models, ask, engine_on, memory
from tests.kit.runs import prompt_of

ENDLESS = 3000  # tokens; nobody waits for the last
LONG, SHORT = prompt_of(1000, seed=5), prompt_of(20, seed=6)


class Held:
    """A reader that delivers records only when released."""

    slabs = None

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.asked, self.let = threading.Event(), threading.Event()

    def start(self, reads: Any, prepare: Callable[[], Any], *how: Any) -> Any:
        def prepared() -> Callable[[Any, Any], None]:
            use = prepare()

            def late(read: Any, record: Any) -> None:
                self.asked.set()
                assert self.let.wait(300)
                use(read, record)

            return late

        return self._reader.start(reads, prepared, *how)

    def close(self) -> None:
        self._reader.close()


@pytest.fixture
def engine(models: Models, tmp_path: Path) -> Iterator[Engine]:
    """It stores a long prompt, with rates by which loading is slow and prefill slower."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(LONG)).result()
        engine.call(engine.live.clear).result()
        rates = lane_of(engine).restorer.rates
        rates.load_bytes_per_s, rates.prefill_tokens_per_s = 1e5, 1.0
        yield engine


@pytest.fixture
def reader(engine: Engine) -> Iterator[Held]:
    restorer = lane_of(engine).restorer
    reader, restorer.reader = restorer.reader, Held(restorer.reader)  # type: ignore[assignment]
    yield restorer.reader  # type: ignore[misc]
    restorer.reader.let.set()  # type: ignore[attr-defined]
    restorer.reader = reader


def lane_of(engine: Engine) -> Lane:
    return engine.lane_of()


def test_others_go_on_while_blocks_are_loaded(engine: Engine, reader: Held) -> None:
    talking = engine.submit(ask(SHORT, ENDLESS))
    events = iter(talking)
    next(event for event in events if isinstance(event, Delta))
    waiting = engine.submit(ask(LONG))
    assert reader.asked.wait(300)
    for _ in range(20):
        next(event for event in events if isinstance(event, Delta))
    assert engine.stats().waiting == 1
    reader.let.set()
    result = waiting.result()
    assert result.receipt.cached_tokens == len(LONG) - 1
    talking.cancel()
    exam = Exam(engine.model.module)
    exam.add(LONG, result.choices[0])
    exam.check()


def test_two_that_load_the_same_compute_what_follows_once(engine: Engine, reader: Held) -> None:
    talking = engine.submit(ask(SHORT, ENDLESS))
    next(event for event in talking if isinstance(event, Delta))
    longer = [*LONG, *prompt_of(600, seed=7)]
    before = engine.stats().counters["prefilled_tokens"]
    both = [engine.submit(ask([*longer, last])) for last in (1, 2)]
    assert reader.asked.wait(300)
    reader.let.set()
    for answer in both:
        answer.result()
    computed = engine.stats().counters["prefilled_tokens"] - before
    assert computed <= len(longer) - len(LONG) + 10
    talking.cancel()


def test_a_single_request_loads_at_once(engine: Engine, reader: Held) -> None:
    """There is no other request to serve meanwhile."""
    reader.let.set()
    result = engine.submit(ask(LONG)).result()
    assert result.receipt.cached_tokens == len(LONG) - 1


def test_it_may_be_cancelled_while_it_loads(engine: Engine, reader: Held) -> None:
    talking = engine.submit(ask(SHORT, ENDLESS))
    next(event for event in talking if isinstance(event, Delta))
    waiting = engine.submit(ask(LONG))
    assert reader.asked.wait(300)
    waiting.cancel()
    with pytest.raises(Cancelled):
        waiting.result()
    reader.let.set()
    talking.cancel()
    assert engine.submit(ask(LONG)).result().receipt.cached_tokens == len(LONG) - 1
    assert engine.stats().waiting == 0


def test_memory_that_a_load_holds_comes_free_again(models: Models, tmp_path: Path) -> None:
    """A request that does not fit beside it is before it in the queue; both are answered."""
    model = models.of("llama")
    n_bytes = kv_bytes(layout_of(model), len(LONG) + 6)
    with engine_on(model, tmp_path, memory=memory(batch_bytes=3 * n_bytes)) as engine:
        engine.submit(ask(LONG)).result()
        engine.call(engine.live.clear).result()
        restorer = lane_of(engine).restorer
        restorer.rates.load_bytes_per_s, restorer.rates.prefill_tokens_per_s = 1e5, 1.0
        reader, restorer.reader = restorer.reader, Held(restorer.reader)  # type: ignore[assignment]
        talking = engine.submit(ask(SHORT, 200))
        next(event for event in talking if isinstance(event, Delta))
        loading = engine.submit(ask(LONG))
        assert restorer.reader.asked.wait(300)  # type: ignore[attr-defined]
        urgent = engine.submit(ask(prompt_of(1000, seed=8), priority=1))
        talking.result()
        restorer.reader.let.set()  # type: ignore[attr-defined]
        assert loading.result().receipt.cached_tokens == len(LONG) - 1
        assert urgent.result().choices[0].tokens
        restorer.reader = reader


def layout_of(model: Any) -> Any:
    return probe(model.module, make_prompt_cache(model.module))

"""A prompt is computed from its front while its blocks are loaded from the back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from keepwarm.cache.restore.loading import Reader
from keepwarm.cache.restore.plan import Needs, Point, Read
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.restorer import MEETING_SHARE, Plan
from keepwarm.engine.engine import Engine
from keepwarm.errors import Cancelled, CorruptBlock
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part
from keepwarm.store.tiers import Tiers
from keepwarm.text.request import KVOptions, Progress, Result
from tests.kit.compare import TOLERANCE
from tests.kit.engines import Models, ask, engine_on
from tests.kit.restorers import planner_over
from tests.kit.runs import prompt_of

PROMPT = prompt_of(9 * BLOCK_TOKENS, seed=5)
N_STORED = len(PROMPT) - 1


class SlowReader:
    """Delivers the last blocks before anything is computed, those before `first` when released."""

    slabs = None
    on_gpu = False
    n_threads = 3

    def __init__(self, reader: Reader, first: int) -> None:
        self._reader, self._first = reader, first
        self.let, self.is_bad = threading.Event(), False

    def start(self, reads: Any, prepare: Callable[[], Any], *how: Any) -> Any:
        def prepared() -> Callable[[Any, Any], None]:
            use = prepare()

            def late(read: Any, record: Any) -> None:
                if read.number < self._first:
                    if self.is_bad:
                        raise CorruptBlock("0", read.number, "it is not wanted")
                    assert self.let.wait(10)
                use(read, record)

            return late

        self.started = self._reader.start(reads, prepared, *how)
        wait(self.started.futures[: len(reads) - self._first])
        return self.started

    def close(self) -> None:
        self._reader.close()


@pytest.fixture(scope="module")
def engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_on(models.of("llama"), tmp_path_factory.mktemp("meeting")) as engine:
        engine.lane_of().restorer.rates.prefill_tokens_per_s = 1e4  # what is slow is so at once
        yield engine


@pytest.fixture(scope="module")
def cold(engine: Engine) -> Result:
    return engine.submit(ask(PROMPT)).result()


@pytest.fixture
def slow(engine: Engine, cold: Result) -> Iterator[Callable[[int], SlowReader]]:
    restorer = engine.lane_of().restorer
    reader, made = restorer.reader, []

    def slow(first: int) -> SlowReader:
        made.append(SlowReader(reader, first))
        restorer.reader = made[-1]  # type: ignore[assignment]
        return made[-1]

    yield slow
    for one in made:
        one.let.set()
    restorer.reader = reader


def again(engine: Engine, policy: Policy = Policy.READ_ONLY) -> Result:
    engine.call(engine.live.clear).result()
    return engine.submit(ask(PROMPT, policy=policy)).result()


def check(result: Result, cold: Result) -> None:
    found, right = result.choices[0].tokens, cold.choices[0].tokens
    assert [one.token for one in found] == [one.token for one in right]
    apart = [abs(a.logprob - b.logprob) for a, b in zip(found, right, strict=True)]
    assert max(apart) < TOLERANCE


@pytest.mark.parametrize("first", [1, 5, 8])
def test_they_meet_at_any_block_and_the_answer_is_the_same(first, engine, slow, cold):
    reader, fed = slow(first), engine.stats().counters["prefilled_tokens"]
    result = again(engine, Policy.READ_WRITE)
    n_computed = first * BLOCK_TOKENS
    assert result.receipt.reused == {"memory": N_STORED - n_computed}
    assert result.receipt.recomputed == n_computed + 1
    assert engine.stats().counters["prefilled_tokens"] - fed == n_computed + 1
    reader.let.set()  # what was on its way goes nowhere
    check(result, cold)
    check(again(engine), cold)


def test_a_block_that_cannot_be_loaded_is_computed_like_all_others(engine, slow, cold):
    reader = slow(4)
    reader.is_bad = True
    result = again(engine, Policy.READ_WRITE)
    assert (result.receipt.reused, result.receipt.recomputed) == ({}, len(PROMPT))
    assert engine.lane_of().restorer.failures.by_reason["layout"] == 1
    check(result, cold)
    reader.is_bad = False
    reader.let.set()
    assert again(engine).receipt.cached_tokens == N_STORED  # it is kept again


def test_all_is_computed_where_nothing_comes(engine, slow, cold):
    slow(9)
    result = again(engine)
    assert (result.receipt.reused, result.receipt.recomputed) == ({}, len(PROMPT))
    check(result, cold)


def test_it_may_be_cancelled_meanwhile(engine, slow):
    reader = slow(8)
    engine.call(engine.live.clear).result()
    answer = engine.submit(ask(PROMPT, policy=Policy.READ_ONLY))
    assert isinstance(next(iter(answer)), Progress)  # a part is computed, and nothing is promised
    answer.cancel()
    with pytest.raises(Cancelled):
        answer.result()
    assert engine.stats().prefilling == 0
    assert all(one.cancelled() for one in reader.started.futures[1 + reader.n_threads :])


@pytest.mark.parametrize(
    ("needs", "n_reads", "at_rest", "can_meet"),
    [
        (Needs(True, 0, False), 8, None, True),
        (Needs(True, 0, False), 7, None, False),
        (Needs(True, 0, False), 8, "q8", False),
        (Needs(True, 512, False), 8, None, False),
        (Needs(True, 0, True), 8, None, False),
    ],
)
def test_only_exact_rows_of_several_blocks_can_meet(needs, n_reads, at_rest, can_meet):
    restorer = planner_over(Tiers([]), needs)
    restorer.at_rest = at_rest
    reads = tuple(Read(BlockKey(bytes([n])), Part.DELTA, n) for n in range(n_reads))
    assert restorer.can_meet(Point(n_reads * BLOCK_TOKENS, reads, 0)) == can_meet


def test_quantised_caches_wait_for_their_blocks(engine, slow):
    """Their rows may be computed from exact ones."""
    reader = slow(1)
    lane = replace(engine.lane_of(), options=KVOptions(kv_bits=8))
    threading.Timer(0.2, reader.let.set).start()
    engine.call(engine.live.clear).result()
    work = partial(lane.restore, PROMPT, Policy.READ_ONLY, may_meet=True)
    warm = engine.call(work).result()
    assert (warm.n_tokens, warm.behind) == (N_STORED, None)


@pytest.mark.parametrize(("tokens_per_s", "is_slow"), [(10, False), (1e4, True)])
def test_only_where_it_saves_a_tenth(tokens_per_s, is_slow, engine, slow, monkeypatch):
    """A load that takes less than a ninth of computing is waited for."""
    reader, restorer = slow(8), engine.lane_of().restorer
    monkeypatch.setattr(restorer.rates, "prefill_tokens_per_s", tokens_per_s)
    loading = restorer.begin(PROMPT, Policy.READ_ONLY, may_meet=True)
    if not is_slow:
        threading.Timer(0.3, reader.let.set).start()
    assert engine.call(lambda: restorer.is_slow(loading)).result() == is_slow
    loading.abandon()


def test_nobody_waits_for_a_load_that_is_expected_to_be_slow(engine, slow, monkeypatch):
    slow(8)
    restorer = engine.lane_of().restorer
    n_bytes = restorer.plan(PROMPT).point.n_bytes
    monkeypatch.setattr(restorer.rates, "load_bytes_per_s", n_bytes / 3000)
    monkeypatch.setattr(restorer.rates, "prefill_tokens_per_s", len(PROMPT) / 1000)
    assert restorer.begin(PROMPT, Policy.READ_ONLY) is None  # in 3000 seconds, not in 1000
    loading = restorer.begin(PROMPT, Policy.READ_ONLY, may_meet=True)
    assert engine.call(lambda: restorer.is_slow(loading)).result()
    loading.abandon()


@pytest.mark.parametrize(("times_slower", "is_worth"), [(1, True), (8, True), (10, False)])
def test_a_load_slower_than_computing_is_begun_where_it_helps(times_slower, is_worth):
    n_bytes = N_STORED
    rates = Rates(load_bytes_per_s=n_bytes / times_slower, prefill_tokens_per_s=N_STORED)
    plan = Plan(Point(N_STORED, (), n_bytes), float(times_slower), rates)
    assert plan.is_worth_loading(0, MEETING_SHARE) == is_worth
    assert plan.is_worth_loading() == (times_slower == 1)

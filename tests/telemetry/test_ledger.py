"""One record of a request, and the counts that follow from all of them."""

import random
import threading
import time
from dataclasses import replace

import pytest

from keepwarm.telemetry.ledger import MAX_TITLES, Ledger, RequestRecord
from keepwarm.telemetry.misses import MissCandidate
from keepwarm.text.request import Receipt, Request, Sampling, Usage
from tests.kit.engines import ask, engine_on
from tests.kit.runs import prompt_of
from tests.kit.waiting import wait_until

NOON = 1_700_000_000.0 // 86400 * 86400 + 12 * 3600


class Clock:
    def __init__(self, now=NOON):
        self.now = now

    def __call__(self):
        return self.now


def record(live=0, disk=0, computed=0, saved_ms=0.0, ttft_ms=None, **changes):
    """A request that ended as it should."""
    n_prompt = live + disk + computed
    reused = {tier: n for tier, n in (("live", live), ("disk", disk)) if n}
    usage = None if ttft_ms is None else Usage(n_prompt, live + disk, 3, 0, ttft_ms, 10.0)
    done = RequestRecord(
        number=1,
        seconds=1.0,
        tenant="",
        agent=None,
        model="tiny",
        state="done",
        prompt_tokens=n_prompt,
        answer_tokens=3,
        receipt=Receipt(n_prompt, reused, computed, saved_ms),
        computed_tokens=computed,
        ttft_ms=ttft_ms,
        usage=usage,
        ended=NOON,
    )
    return replace(done, **changes)


def test_counters_are_sums_of_records():
    ledger = Ledger()
    ledger.append(record(live=10, computed=2, saved_ms=7.5))
    ledger.append(record(disk=4, computed=6, state="cancelled", prompt_tokens=100, saved_ms=50.0))
    ledger.append(record(receipt=None, state="failed"))
    ledger.append(record(live=7, computed=1, asks_for_reuse=False))
    found = ledger.counters()
    assert (found["finished"], found["cancelled"], found["failed"]) == (2, 1, 1)
    assert found["prompt_tokens"] == 22, "of the cancelled one what was reused or computed"
    assert found["reused_tokens"] == {"live": 10, "memory": 0, "disk": 4}
    assert found["saved_ms"] == 7.5, "nothing was saved for a prompt that was not finished"


@pytest.mark.parametrize(
    ("reused", "computed", "is_warm"), [(0, 9, False), (4, 9, False), (9, 9, False), (10, 9, True)]
)
def test_latencies_are_by_what_the_larger_part_of_the_prompt_was(reused, computed, is_warm):
    ledger = Ledger()
    ledger.append(record(live=reused, computed=computed, ttft_ms=50.0))
    totals = {sample.label: sample for sample in ledger.times_to_first_token()}
    warm, other = (totals["yes"], totals["no"]) if is_warm else (totals["no"], totals["yes"])
    assert (warm.total, other.total) == (0.05, 0.0)
    assert dict(warm.buckets)["0.05"] == dict(warm.buckets)["+Inf"] == 1
    assert dict(warm.buckets)["0.025"] == dict(other.buckets)["+Inf"] == 0
    assert ledger.times_per_token().total == pytest.approx(0.1)


def test_the_time_of_a_token_is_that_of_one_answer():
    """Four that are decoded together, at 10 tokens per second, have a token each in 0.4 s."""
    ledger = Ledger()
    ledger.append(record(computed=9, ttft_ms=50.0, n_sequences=4))
    assert ledger.times_per_token().total == pytest.approx(0.4)


def test_counters_are_read_while_engines_write():
    """Each thread adds new tiers, and all that is read is a whole sum."""
    ledger, stopped = Ledger(), threading.Event()

    def write(name):
        for n in range(2000):
            tier = f"{name} {n}"
            one = record()
            ledger.append(replace(one, receipt=replace(one.receipt, reused={tier: 1})))

    def read():
        while not stopped.is_set():
            found = ledger.counters()
            assert sum(found["reused_tokens"].values()) == found["finished"]

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stopped.set()
    reader.join()
    assert ledger.counters()["finished"] == 4000


def test_texts_forgotten_during_the_comparison_are_not_shown(monkeypatch):
    ledger = Ledger()
    packed = bytes(4 * 400)
    candidate = MissCandidate(1, "", None, "tiny", NOON, packed, packed, 400, 0, 100.0)
    ledger.append(record(), candidate)
    assert len(ledger.misses()) == 1, "the control"
    ledger.append(record(), candidate)

    def compare(each):
        ledger.forget_texts()
        return found(each)

    from keepwarm.telemetry import ledger as module

    found = module.find_miss
    monkeypatch.setattr(module, "find_miss", compare)
    assert ledger.misses() == []


def test_the_oldest_titles_are_read_again():
    ledger = Ledger()
    for number in range(MAX_TITLES + 1):
        ledger.title_of(str(number), 1, lambda: "old")
    assert ledger.title_of("1", 1, lambda: "new") == "old"
    assert ledger.title_of("0", 1, lambda: "new") == "new"


# In an engine.


def test_a_cancelled_request_is_booked_with_what_was_computed(models, tmp_path):
    """Not with what was planned: 1 slice of 16 tokens, or some, of 3,000."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = 16
        answer = engine.submit(ask(prompt_of(3000), 4))
        wait_until(lambda: engine.stats().counters["prefilled_tokens"] > 0)
        answer.cancel()
        wait_until(engine.ledger.records)
        (cut,) = engine.ledger.records()
        counters = engine.stats().counters
        assert cut.state == "cancelled"
        assert 0 < cut.computed_tokens == counters["prefilled_tokens"] < 3000
        assert cut.receipt.recomputed == cut.computed_tokens
        assert counters["prompt_tokens"] == cut.processed_tokens
        assert engine.stats().counts.computed == cut.computed_tokens
        assert (cut.saved_ms, counters["saved_ms"]) == (0.0, 0.0)


def test_computed_tokens_equal_prefilled_ones_under_cancellations(models, tmp_path):
    chance = random.Random(7)
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = 16
        for n in range(12):
            prompt = [*prompt_of(200), *prompt_of(40 * (n % 4), 10 + n)]
            answer = engine.submit(ask(prompt, 2))
            if n % 2:
                time.sleep(chance.random() / 50)
                answer.cancel()
            else:
                answer.result()
        wait_until(lambda: len(engine.ledger.records()) == 12)
        stats = engine.stats()
        assert stats.counts.computed == stats.counters["prefilled_tokens"] > 0
        assert stats.counts.prompt_tokens == stats.counters["prompt_tokens"]
        records = engine.ledger.records()
        assert sum(one.computed_tokens for one in records) == stats.counts.computed


def test_phases_add_up_to_the_time_to_first_token(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        engine.submit(ask(prompt_of(60), 2)).result()
        engine.submit(Request(prompt=prompt_of(50, 3), sampling=Sampling(max_tokens=0))).result()
        answered, warmed = engine.ledger.records()
        parts = ["reading", "preparing", "waiting", "restoring", "prefilling", "first_step"]
        assert list(answered.phases_ms) == parts
        assert sum(answered.phases_ms.values()) == pytest.approx(answered.ttft_ms, abs=0.5)
        assert list(warmed.phases_ms) == parts[:-1]
        assert engine.ledger.phases_s() == {
            name: pytest.approx(ms / 1000) for name, ms in answered.phases_ms.items()
        }

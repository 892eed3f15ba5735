"""How long a question to a shared tier may take, and a load from one."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from keepwarm.cache.restore.plan import NOTHING, Needs
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.restore.restorer import Plan
from keepwarm.concurrency import CallError
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.prefix.policy import Policy
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.tier import MIN_READ_S, RemoteTier
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.kit.restorers import planner_over
from tests.store.kit import record, refs_of, tokens_of

SOON = 30.0  # nothing here may hang
FAR_S = 0.08  # of every call
N_BLOCKS = 8
PROMPT = [*tokens_of(N_BLOCKS * BLOCK_TOKENS), 7]
KEYS = [ref.key for ref in refs_of(N_BLOCKS)]
SLOWLY, QUICKLY = Rates(prefill_tokens_per_s=100.0), Rates(prefill_tokens_per_s=5000.0)


class Clock:
    now = 5.0

    def __call__(self):
        return self.now


def deadline(load_s, clock=None, **changes):
    """Of 1,000 tokens, of which 500 are here; 50 are computed in a second."""
    point = NOTHING._replace(n_tokens=1000)
    fields = {"is_shared": True, "n_here": 500, **changes}
    return Plan(point, load_s, Rates(), **fields).deadline(clock or Clock())


@pytest.mark.parametrize(
    ("load_s", "n_here", "seconds"),
    [(2.0, 500, 4.0), (4.9, 500, 9.8), (6.0, 500, 10.0), (0.1, 500, 1.0), (0.001, 999, MIN_READ_S)],
    ids=["twice", "nearly", "no longer than computing", "a tenth of computing", "at least"],
)
def test_a_load_has_twice_its_planned_time_and_no_more_than_computing_takes(
    load_s, n_here, seconds
):
    clock = Clock()
    limit = deadline(load_s, clock, n_here=n_here)
    assert limit.timeout_s == pytest.approx(seconds)
    clock.now += seconds - 0.001
    assert not limit.is_over
    clock.now += 0.002
    assert limit.is_over
    with pytest.raises(CallError):
        limit.left_s()


def test_what_is_here_has_no_limit():
    assert deadline(2.0, is_shared=False) is None


class Far:
    """A place whose calls take their time by a clock that stands still otherwise."""

    def __init__(self, backend, clock, is_distant):
        self._backend, self._clock = backend, clock
        self.in_batches, self.is_distant = backend.in_batches, is_distant
        self.call_s = FAR_S
        self.n_calls = 0

    def __getattr__(self, name):
        call = getattr(self._backend, name)

        def far(*args, **options):
            timeout_s = next(one for one in args if isinstance(one, float))
            self.n_calls += 1
            self._clock.now += min(self.call_s, timeout_s)
            if self.call_s > timeout_s:
                raise CallError("late")
            return call(*args, **options)

        return call if name == "close" else far


@contextmanager
def tier_over(backend, **options):
    tier = RemoteTier(backend, "class", **options)
    try:
        until = time.monotonic() + SOON
        while not tier.health.wait_until_tried(SOON):  # on a busy machine a trial may be late
            assert time.monotonic() < until
            time.sleep(0.05)
        yield tier
    finally:
        tier.close()


def share(url):
    """What another machine has put."""
    with tier_over(open_backend(url)) as first:
        assert all(first.put(record(ref)).stored for ref in refs_of(N_BLOCKS))


def ask(tier, rates, prompt=PROMPT):
    needs = Needs(delta=True, window=0, state=False)
    planner_over(Tiers([], [tier]), needs, rates).ask(prompt, Policy.READ_WRITE)


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A tier of which every call takes 80 ms."""
    clock = Clock()
    share(tmp_path.as_uri())

    @contextmanager
    def opened(is_distant=True):
        place = Far(open_backend(tmp_path.as_uri()), clock, is_distant)
        with tier_over(place, clock=clock) as tier:
            tier.place, tier.clock = place, clock
            yield tier

    return opened


def test_a_bucket_at_80_ms_a_call_is_used_from_the_first_long_prompt_on(far):
    with far() as tier:
        ask(tier, SLOWLY)
        assert tier.have(KEYS).keys() == set(KEYS)
        assert tier.stats().errors == 0
    with far(is_distant=False) as tier:  # as it would be with a fixed time
        ask(tier, SLOWLY)
        assert tier.have(KEYS) == {}
        assert tier.stats().errors == 1


def test_it_is_not_asked_for_what_is_soon_computed_and_that_is_no_failure(far):
    with far() as tier:
        before = tier.place.n_calls
        for _ in range(5):
            ask(tier, QUICKLY)
        assert tier.place.n_calls == before
        assert tier.is_trusted
        assert tier.stats().errors == 0
        ask(tier, SLOWLY)
        assert tier.have(KEYS).keys() == set(KEYS)


def test_what_became_slower_is_left_alone_and_then_measured_anew(far):
    with far() as tier:
        for _ in range(100):
            tier.has(record(refs_of(1)[0]).header)
        tier.place.call_s = 4.6 * FAR_S
        for seed in (1, 2, 3):
            ask(tier, SLOWLY, tokens_of(len(PROMPT), seed))
        assert tier.is_open
        tier.clock.now += 10.0
        until = time.monotonic() + SOON
        while tier.is_open:
            assert time.monotonic() < until
            time.sleep(0.01)
        ask(tier, Rates(prefill_tokens_per_s=10.0))
        assert tier.have(KEYS).keys() == set(KEYS)


def test_what_seemed_too_slow_is_timed_again_in_the_background(far, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.tier.REFRESH_S", 0.02)
    with far() as tier:
        tier.place.call_s = FAR_S / 100
        ask(tier, QUICKLY)
        until = time.monotonic() + SOON
        while not tier.have(KEYS):
            assert time.monotonic() < until
            time.sleep(0.02)
            ask(tier, QUICKLY)


def test_a_prompt_that_is_all_here_asks_nobody(far):
    """Even where the one token that is left takes a second."""
    memory = MemoryTier(1 << 20)
    needs, rates = Needs(delta=True, window=0, state=False), Rates(prefill_tokens_per_s=1.0)
    with far(is_distant=False) as tier:
        planner = planner_over(Tiers([("memory", memory)], [tier]), needs, rates)
        for ref in refs_of(N_BLOCKS):
            memory.put(record(ref))
        before = tier.place.n_calls
        planner.ask(PROMPT, Policy.READ_WRITE)
        assert tier.place.n_calls == before
        planner.ask([*PROMPT, *range(300)], Policy.READ_WRITE)
        assert tier.place.n_calls > before
    memory.close()


def test_a_tier_that_is_gone_costs_a_prompt_no_looking_up(far):
    looked = []
    here = SimpleNamespace(
        have=lambda keys: looked.append(keys) or {}, children=lambda *_: [], states=lambda _: []
    )
    with far(is_distant=False) as tier:
        planner = planner_over(Tiers([("here", here)], [tier]), Needs(True, 0, False), SLOWLY)
        planner.plan(PROMPT)
        n_with, before = len(looked), tier.place.n_calls
        tier.health.close()
        looked.clear()
        planner.ask(PROMPT, Policy.READ_WRITE)
        assert not looked
        planner.plan(PROMPT)
        assert len(looked) < n_with
        assert tier.place.n_calls == before

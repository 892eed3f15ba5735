"""One key's requests for a model cannot keep another key from the one that it uses."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from keepwarm import config
from keepwarm.errors import Busy, StillLoading, Stopping
from keepwarm.server.models import slots as slots_module
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from keepwarm.server.models.slots import TURN_ANSWERS, KeyTurns, Slot
from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.conftest import running

CHAT = "/v1/chat/completions"
LATE = StillLoading("Retry.")


@pytest.fixture
def models():
    """With one model that is loaded, as far as its slot knows."""
    made = Models(EngineHost(None, "m"), config.load({}))
    made.default.host._engine = object()
    made.default.is_offered = True
    yield made
    made.default.host.take()
    made.close()


@contextmanager
def wanted(models, wait_s=300.0):
    """The attacker waits for another model, for which the one that is loaded is to make room."""
    slots, slot, other = models.slots, models.default, Slot(EngineHost(None, "o"), ["o"], "o")
    with ThreadPoolExecutor(1) as thread, slots.waiting(other, "attacker"):
        end = time.monotonic() + wait_s
        idle = thread.submit(slots._wait_until_idle, slot, end, other)
        wait_until(lambda: bool(slots._changed._waiters) or idle.done())
        yield slots, slot, other, idle


def use(slots, slot, owner):
    """One request; whether the model took it."""
    with ExitStack() as held:
        return slots.lease(slot, held, owner)


def count_answers(slots, slot, owner, idle):
    n = 0
    while not idle.done() and use(slots, slot, owner):
        n += 1
        time.sleep(0.01)
    return n


def test_a_key_whose_requests_follow_each_other_keeps_its_model_for_its_turn(models):
    assert use(models.slots, models.default, "victim")
    with wanted(models) as (slots, slot, _, idle):
        assert TURN_ANSWERS <= count_answers(slots, slot, "victim", idle) <= TURN_ANSWERS + 60
        assert idle.result(300)
    with wanted(models) as (slots, slot, _, idle):
        slot.is_leaving = False
        assert idle.result(300)  # its turn was that of the other key now


def test_a_key_that_asks_no_more_has_no_turn(models):
    assert use(models.slots, models.default, "victim")
    models.default.used_by["victim"] -= 60
    with wanted(models) as (_, _, _, idle):
        assert idle.result(30)


def test_a_key_has_no_turn_against_itself(models):
    assert use(models.slots, models.default, "attacker")
    with wanted(models) as (_, _, _, idle):
        assert idle.result(30)


def test_a_key_that_asks_now_and_then_waits_for_as_many_answers_as_it_has():
    turns = KeyTurns()
    for _ in range(TURN_ANSWERS):
        assert turns.has_turn("attacker", ["victim"])
        turns.count("attacker", ["victim"])
    for _ in range(100):
        assert not turns.has_turn("attacker", ["victim"])
        turns.count("attacker", ["victim"])
    turns.count("victim", ["attacker"])
    assert turns.has_turn("attacker", ["victim"])
    turns.count("attacker", ["victim"])
    assert not turns.has_turn("attacker", ["victim"])
    assert turns.has_turn("attacker", ["third"])
    assert not turns.has_turn("attacker", ["third", "victim"])


def test_a_key_whose_own_answers_keep_what_it_waits_for_keeps_out_only_itself(models):
    """The other key has its answers all the time; the waiting one is told that it is too many."""
    models.default.was_awaited = True  # else all are let in until the end in any case
    with ExitStack() as long:
        assert models.slots.lease(models.default, long, "attacker")
        with wanted(models, wait_s=2.0) as (slots, slot, other, idle):
            began = time.monotonic()
            assert count_answers(slots, slot, "victim", idle) > TURN_ANSWERS
            assert time.monotonic() - began > 1.5  # not only for half of the time
            assert not idle.result(300)
            assert isinstance(slots.late(other, LATE), Busy)
            slot.is_leaving, slot.ending = False, set()
            assert use(slots, slot, "victim")


def test_it_is_still_loading_where_another_key_keeps_it(models):
    with ExitStack() as long:
        assert models.slots.lease(models.default, long, "victim")
        with wanted(models, wait_s=0.2) as (slots, _, other, idle):
            assert not idle.result(300)
            assert slots.late(other, LATE) is LATE


def test_a_key_that_waits_for_another_model_does_not_prolong_the_end_of_this_one(models):
    """Nor does anybody once those have ended that were to end."""
    slots, slot, other = models.slots, models.default, Slot(EngineHost(None, "o"), ["o"], "o")
    slot.makes_room_for = other
    with ExitStack() as held, slots.waiting(other, "attacker"):
        with ExitStack() as ending:
            assert slots.lease(slot, ending, "third")
            slot.ending = set(slot.leases)
            assert not use(slots, slot, "third")
            assert not slots.lease(slot, held, "attacker")
            assert use(slots, slot, "victim")
        assert not use(slots, slot, "victim")


@contextmanager
def leaving(models, wait_s=300):
    """A model in use that is to make room, and the wait for it."""
    slots, slot = models.slots, models.default
    with ThreadPoolExecutor(1) as thread:
        before = ExitStack()
        assert slots.lease(slot, before, "before")
        idle = thread.submit(slots._wait_until_idle, slot, time.monotonic() + wait_s)
        wait_until(lambda: bool(slots._changed._waiters) or idle.done())
        yield slots, slot, before, idle


def test_long_answers_of_one_key_in_a_row_keep_out_only_itself(models):
    """While they last another key has its answers; all together end."""
    with leaving(models) as (slots, slot, before, idle):
        long, other = ExitStack(), ExitStack()
        assert slots.lease(slot, long, "attacker")  # "before" keeps it loaded
        before.close()
        wait_until(lambda: slot.ending)
        assert not slots.lease(slot, ExitStack(), "attacker")
        for _ in range(3):
            with ExitStack() as short:
                assert slots.lease(slot, short, "victim")
        assert slots.lease(slot, other, "victim")
        long.close()
        wait_until(lambda: slot.ending == slot.leases)
        assert not slots.lease(slot, ExitStack(), "victim")  # its turn ends too
        assert not idle.done()
        other.close()
        assert idle.result(300)
        assert not slots.lease(slot, ExitStack(), "attacker")


def test_nobody_starves_who_waits_for_room(models):
    """Keys whose answers overlap without an end keep a model no longer than half of the wait."""
    with leaving(models, wait_s=4) as (slots, slot, before, _):
        answers = [before]
        for number in range(2000):
            answers.append(ExitStack())
            has_lease = slots.lease(slot, answers[-1], f"key {number % 3}")
            answers.pop(0 if has_lease else -1).close()
            if slot.is_leaving:
                break
            time.sleep(0.01)
        assert slot.is_leaving
        answers[0].close()


def test_a_model_that_cannot_be_unloaded_is_never_closed(models):
    with leaving(models, wait_s=0.2) as (slots, slot, before, idle):
        assert not idle.result(300)
        with ExitStack() as held:
            assert slots.lease(slot, held, "before")
        before.close()


def test_answers_that_overlap_keep_a_model_only_once(models):
    """Who waited in vain before has all kept out after half of the time."""
    with leaving(models, wait_s=0.2) as (slots, slot, before, idle):
        assert not idle.result(300)
        again = slots._wait_until_idle(slot, time.monotonic() + 0.2)
        assert (again, slot.is_leaving) == (False, True)
        before.close()


def test_a_key_that_waits_is_let_in_when_its_own_answer_has_ended(models):
    """Not only when the model that waits has had its turn."""
    slots, slot = models.slots, models.default

    async def use():
        async with models.using("m", "victim") as host:
            return host

    async def scenario():
        with ExitStack() as attacker:
            own = ExitStack()
            assert slots.lease(slot, attacker, "attacker")
            assert slots.lease(slot, own, "victim")
            slot.ending = set(slot.leases)
            with slots.changing:  # nothing is loaded meanwhile
                using = asyncio.create_task(use())
                while not slot.n_waiting:
                    await asyncio.sleep(0.01)
                assert not using.done()
                own.close()
                assert await asyncio.wait_for(using, 60) is slot.host

    asyncio.run(scenario())


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_for_which_nobody_waits_any_more_is_left(models, waits):
    """Whoever had it queued was let in meanwhile, or has gone."""
    slots, slot = models.slots, models.default
    slot.host.take()
    with ExitStack() as waiting:
        with slots.changing:  # nothing is loaded meanwhile
            waiting.enter_context(slots.waiting(slot))
            loading = slots.loading(slot)
            if not waits:
                waiting.close()
        error = loading.exception(60)
    assert isinstance(error, Stopping) == waits  # there is no store: it was tried


def test_who_waited_for_a_model_has_it_before_it_is_unloaded_for_another(models, monkeypatch):
    monkeypatch.setattr(slots_module, "HAND_OVER_S", 300.0)
    slots, slot = models.slots, models.default
    with ThreadPoolExecutor(1) as thread:
        with slots.waiting(slot):
            idle = thread.submit(slots._wait_until_idle, slot, time.monotonic() + 300)
            wait_until(lambda: bool(slots._changed._waiters))
            assert not slot.is_leaving
            held = ExitStack()
            assert slots.lease(slot, held)
        assert not idle.done()
        held.close()
        assert idle.result(300)


N_ASKED = 30


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory):
    """A server with two keys and two models, of which one fits into memory."""
    from keepwarm.cache.store import Store
    from keepwarm.server.app import create_app

    paths = [write_checkpoint(tmp_path_factory.mktemp(name), seed=i) for i, name in enumerate("ab")]
    n_bytes = (paths[0] / "model.safetensors").stat().st_size
    home = str(tmp_path_factory.mktemp("home"))
    given = {"KEEPWARM_HOME": home, "KEEPWARM_API_KEYS": "attacker,victim"}
    names = {"model": f"own={paths[0]}", "more_models": f"other={paths[1]}"}
    settings = config.load(given, **names, weights_bytes=n_bytes + 1)
    with Store(settings=settings) as store:
        made = Models.of(settings, store)
        with running(create_app(made, settings), settings) as live:
            made.start()
            yield live


def ask(live, key, model):
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{live.url}{CHAT}", json=body, headers=headers, timeout=300).status_code


def test_a_key_that_asks_for_another_model_seldom_takes_a_key_s_own(one_at_a_time):
    """Both are answered; without turns it would be loaded for nearly each of the requests."""
    live, stop, attacks = one_at_a_time, threading.Event(), []

    def attack():
        while not stop.is_set():
            attacks.append(ask(live, "attacker", "other"))

    slot = live.models.known("own")
    assert ask(live, "victim", "own") == 200
    threads = [threading.Thread(target=attack) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        answers = [ask(live, "victim", "own") for _ in range(N_ASKED)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(300)
    assert set(answers) == set(attacks) == {200}
    assert 1 < slot.n_loads < N_ASKED // 3

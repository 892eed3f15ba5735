"""Permits to prepare requests: fair between keys, and never lost."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import httpx
import pytest
from anyio.to_thread import current_default_thread_limiter

from keepwarm import config
from keepwarm.errors import Stopping
from keepwarm.server.http import permits
from keepwarm.server.http.keys import ApiKeys
from keepwarm.server.http.limits import Limits
from keepwarm.server.http.permits import (
    LONG_BODY,
    MANAGEMENT_OF_ONE_KEY,
    MANAGEMENT_THREADS,
    MAX_REST_S,
    REST,
    FairSemaphore,
    PrepareLimiter,
    PrepareSlot,
    prepare_threads,
)
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from keepwarm.session.compaction import Compaction
from keepwarm.text.sandbox.deadline import PrepareDeadline
from tests.kit.waiting import wait_until

CHAT = "/v1/chat/completions"


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), 60))


async def let_others_run():
    for _ in range(5):
        await asyncio.sleep(0)


def test_fair_semaphore_gives_a_key_no_more_than_its_share_and_starts_others_at_once():
    async def scenario():
        semaphore, begun = FairSemaphore(at_once=3, each=2), []

        async def ask(owner):
            await semaphore.acquire(owner)
            begun.append(owner)

        tasks = [asyncio.create_task(ask("a")) for _ in range(9)]
        await let_others_run()
        assert begun == ["a", "a"]
        await ask("b")
        assert begun == ["a", "a", "b"]
        for task in tasks:
            task.cancel()

    run(scenario)


def test_fair_semaphore_serves_waiting_keys_in_turn():
    async def scenario():
        semaphore, begun = FairSemaphore(at_once=1, each=1), []

        async def ask(owner):
            async with semaphore.permit(owner):
                begun.append(owner)

        async with semaphore.permit("first"):
            tasks = [asyncio.create_task(ask(owner)) for owner in "aaaabcc"]
            await let_others_run()
        await asyncio.gather(*tasks)
        assert "".join(begun) == "abcacaa"
        assert semaphore.n_held == 0

    run(scenario)


def test_who_goes_on_is_before_those_of_its_key_who_begin():
    """The engine may wait for the rest of a request; a key still waits for its turn."""

    async def scenario():
        semaphore, begun = FairSemaphore(at_once=1, each=1), []
        going = semaphore.permit("a")
        async with going:
            pass

        async def ask(name, permit):
            async with permit:
                begun.append(name)

        async with semaphore.permit("c"):
            waiting = [("b", semaphore.permit("b"))]
            waiting += [(name, semaphore.permit("a")) for name in ("new", "newer")]
            tasks = [asyncio.create_task(ask(*each)) for each in (*waiting, ("going", going))]
            await let_others_run()
        await asyncio.gather(*tasks)
        assert begun == ["b", "going", "new", "newer"]

    run(scenario)


def test_fair_semaphore_deals_a_permit_of_a_cancelled_waiter_to_the_next():
    async def scenario():
        semaphore = FairSemaphore(at_once=1, each=1)
        await semaphore.acquire("a")
        gone, dealt = (asyncio.create_task(semaphore.acquire("b")) for _ in range(2))
        await let_others_run()
        gone.cancel()
        await let_others_run()
        semaphore.release("a")
        await dealt
        late = asyncio.create_task(semaphore.acquire("c"))
        await let_others_run()
        semaphore.release("b")  # dealt to c, which is cancelled before it can see it
        late.cancel()
        await let_others_run()
        await semaphore.acquire("d")

    run(scenario)


def test_a_key_that_rests_gets_no_permit_and_keeps_no_other_waiting():
    async def scenario():
        rests = {"a"}
        semaphore = FairSemaphore(at_once=3, each=1, rests=rests.__contains__)
        for owner, worked_s in (("a", 1e6), ("b", 1e6), ("c", 0.01)):
            await semaphore.acquire(owner)
            semaphore.release(owner, worked_s)
            rests.add("c")
        resting = asyncio.create_task(semaphore.acquire("a"))
        await let_others_run()
        await semaphore.acquire("b")  # which was alone
        await semaphore.acquire("c")  # once it has rested
        assert not resting.done()
        resting.cancel()

    run(scenario)


class EarlyLoop(asyncio.SelectorEventLoop):
    """Its timers are a little early by its own clock, as where that is rounded."""

    def call_at(self, when, callback, *arguments, context=None):
        return super().call_at(when - 0.01, callback, *arguments, context=context)


def test_a_rest_ends_with_its_timer_whatever_the_clock_says():
    async def scenario():
        semaphore = FairSemaphore(at_once=1, each=1, rests=lambda _: True)
        await semaphore.acquire("a")
        semaphore.release("a", 0.05 / REST)
        await asyncio.wait_for(semaphore.acquire("a"), 10)

    with asyncio.Runner(loop_factory=EarlyLoop) as runner:
        runner.run(scenario())


def test_rests_do_not_add_up_without_end(monkeypatch):
    monkeypatch.setattr(permits, "MAX_REST_S", 0.05)

    async def scenario():
        semaphore = FairSemaphore(at_once=2, each=2, rests=lambda _: True)
        for _ in range(2):
            await semaphore.acquire("a")
        for _ in range(2):
            semaphore.release("a", 1e6)
        await asyncio.wait_for(semaphore.acquire("a"), 10)

    run(scenario)


def test_a_rest_ends_with_its_reason_for_all_that_wait():
    async def scenario():
        rests = {"a"}
        semaphore = FairSemaphore(at_once=4, each=2, rests=rests.__contains__)
        await semaphore.acquire("a")
        semaphore.release("a", 1e6)
        waiting = [asyncio.create_task(semaphore.acquire("a")) for _ in range(3)]
        await let_others_run()
        assert not any(task.done() for task in waiting)
        rests.clear()
        semaphore.deal()
        await let_others_run()
        assert [task.done() for task in waiting] == [True, True, False]
        waiting[2].cancel()

    run(scenario)


def test_a_permit_that_is_paused_does_not_rest_before_it_goes_on():
    async def scenario():
        semaphore = FairSemaphore(at_once=1, each=1, rests=lambda _: True)
        async with semaphore.permit("a") as permit:
            permit.worked_s = 1e6
            async with asyncio.timeout(1), permit.paused():
                pass
            assert permit.worked_s == 1e6

    run(scenario)


def test_a_key_rests_no_longer_once_the_other_has_its_answer():
    async def scenario():
        may_end = asyncio.Event()

        async def app(scope, receive, send):
            if scope["state"]["owner"] == "other":
                await may_end.wait()
            else:
                scope["state"]["slot"]._permit.worked_s = 1e6
            await answer(scope, receive, send)

        limiter = PrepareLimiter(app, config.load({}), prepare_threads())
        ask = partial(ask_as, limiter)
        other = asyncio.create_task(ask("other", n_bytes=2))
        await let_others_run()
        await ask("a")
        resting = asyncio.create_task(ask("a"))
        while "a" not in limiter._long._waiting:
            await asyncio.sleep(0)
        may_end.set()
        await other
        await asyncio.wait_for(resting, MAX_REST_S / 2)

    run(scenario)


async def ask_as(limiter, owner, n_bytes=LONG_BODY + 1):
    """A request of this key; returns when it has been answered."""

    async def send(message):
        pass

    bodies = [{"type": "http.request", "body": b" " * n_bytes, "more_body": False}]

    async def receive():
        return bodies.pop() if bodies else await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": CHAT, "state": {"owner": owner}}
    await limiter(scope, receive, send)


# Requests that are cancelled


def limits(app, **values):
    """All limits around a limiter around this application."""
    limiter = PrepareLimiter(app, config.load({}, **values), prepare_threads())
    return limited(limiter, **values), limiter


def limited(limiter, **values):
    settings = config.load({}, **values)
    return Limits(limiter, settings, ApiKeys(settings))


def client_of(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def answer(scope, receive, send):
    scope["state"]["slot"].end()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("n_bytes", [2, LONG_BODY + 1])
def test_prepare_limiter_cancelled_while_waiting_for_a_permit_loses_none(n_bytes):
    """Many requests at once that all time out; later ones of the same key are answered."""

    async def scenario():
        may_answer = asyncio.Event()

        async def slow(scope, receive, send):
            await may_answer.wait()
            await answer(scope, receive, send)

        app, limiter = limits(slow, request_timeout_s=0.1, client_timeout_s=0.1)
        async with client_of(app) as client:
            ask = partial(client.post, CHAT, content=b" " * n_bytes)
            late = await asyncio.gather(*(ask() for _ in range(8)))
            assert {each.status_code for each in late} == {503}
        assert limiter.n_held == 0
        may_answer.set()
        async with client_of(limited(limiter)) as client:  # with all the time that it takes
            ask = partial(client.post, CHAT, content=b" " * n_bytes)
            assert [(await ask()).status_code for _ in range(3)] == [200, 200, 200]

    run(scenario)


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "server_error"), ("/v1/messages", "overloaded_error")]
)
def test_timeout_before_the_first_byte_is_an_error_of_the_api_with_retry_after(path, kind):
    async def scenario():
        async def stuck(scope, receive, send):
            await asyncio.Event().wait()

        app, _ = limits(stuck, request_timeout_s=0.1, client_timeout_s=0.1)
        async with client_of(app) as client:
            return await client.post(path, content=b"{}")

    late = run(scenario)
    assert late.status_code == 503
    assert late.headers["retry-after"] == "5"
    assert late.json()["error"]["type"] == kind
    assert "retry in a few seconds" in json.dumps(late.json())


# Leases


def loaded_models(may_load=None):
    """One model that is loaded when it is first asked for, and when it may, without an engine."""

    class LoadedLater(EngineHost):
        loaded = None

    settings = config.load({})
    models = Models(LoadedLater(None, "m"), settings)
    models.default.is_offered = True

    def load(slot):
        assert may_load is None or may_load.wait(60)
        slot.host.loaded = object()

    models.slots.load = load
    return models


def slot_with(permit, threads, watcher):
    deadline = PrepareDeadline(60.0)
    return PrepareSlot(deadline, threads, permit, permit, watcher, is_long=False)


def test_models_use_cancelled_after_the_lease_is_taken_releases_it():
    """While the model was loaded, another request took the permit; its client goes away then."""

    async def scenario():
        may_load = threading.Event()
        models, semaphore = loaded_models(may_load), FairSemaphore(at_once=1, each=1)
        watcher = asyncio.create_task(asyncio.sleep(0))
        with ThreadPoolExecutor(1) as threads:

            async def use():
                async with semaphore.permit("k") as permit:
                    slot = slot_with(permit, threads, watcher)
                    with slot.held:
                        await models.use("m", slot)

            using = asyncio.create_task(use())
            await let_others_run()
            async with semaphore.permit("other"):
                may_load.set()
                while not models.default.n_leases:
                    await asyncio.sleep(0.001)
                using.cancel()
                with suppress(asyncio.CancelledError):
                    await using
        assert models.default.n_leases == 0
        assert semaphore.n_held == 0
        models.close()

    run(scenario)


def test_models_use_that_fails_to_load_leaves_nothing_held():
    async def scenario():
        models, semaphore = loaded_models(), FairSemaphore(at_once=1, each=1)
        models.default.is_offered = False
        watcher = asyncio.create_task(asyncio.sleep(0))
        with ThreadPoolExecutor(1) as threads:
            async with semaphore.permit("k") as permit:
                slot = slot_with(permit, threads, watcher)
                with slot.held, pytest.raises(Stopping):
                    await models.use("m", slot)
        assert models.default.n_leases == semaphore.n_held == 0
        models.close()

    run(scenario)


# Threads


class RefusingExecutor(ThreadPoolExecutor):
    """Stands for an executor whose threads are all busy for minutes."""

    def submit(self, work, /, *arguments, **options):
        raise AssertionError(f"the default executor is asked to run {work}")


MESSAGES = [{"role": "user", "content": "What is the answer?"}]
MARKED = [{"type": "text", "text": "the fox " * 9, "cache_control": {"type": "ephemeral"}}]
ASKED = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "the fox", "max_tokens": 2},
    "/v1/embeddings": {"input": ["the fox", "the dog"]},
    "/v1/messages": {"messages": [{"role": "user", "content": MARKED}], "max_tokens": 2},
    "/v1/responses": {"input": "the fox", "max_output_tokens": 16},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 2}},
    "/api/embed": {"model": "tiny", "input": "the fox"},
    "/v1/cache/prefill": {"messages": MESSAGES},
}


async def take_management_threads():
    """All of them, as many checks of a store would for minutes."""
    limiter = current_default_thread_limiter()
    for _ in range(MANAGEMENT_THREADS):
        await limiter.acquire_on_behalf_of(object())
    assert limiter.available_tokens == 0


@pytest.mark.parametrize("verb", ["resume", "manage"])
def test_what_a_key_does_after_its_slots_leaves_threads_to_others(verb):
    async def scenario():
        semaphore, may_end = FairSemaphore(at_once=2, each=1), threading.Event()
        current_default_thread_limiter().total_tokens = 2
        watcher = asyncio.create_task(asyncio.sleep(0))
        with ThreadPoolExecutor(2) as threads:

            def begin(owner, work):
                slot = slot_with(semaphore.permit(owner), threads, watcher)
                return asyncio.create_task(getattr(slot, verb)(work))

            waiting = [begin("a", partial(may_end.wait, 60)) for _ in range(2)]
            await let_others_run()
            try:
                assert await asyncio.wait_for(begin("b", int), 10) == 0
            finally:
                may_end.set()
            assert await asyncio.gather(*waiting) == [True, True]
        assert semaphore.n_held == 0

    run(scenario)


def test_compactions_wait_for_the_disk_without_threads_of_requests_or_lists(serving, monkeypatch):
    names, may_end = {"warm": [], "finish": []}, threading.Event()

    def noting(verb, work):
        def noted(*given):
            names[verb].append(threading.current_thread().name)
            assert verb == "warm" or may_end.wait(60)
            return work(*given)

        return noted

    for verb in ("warm", "finish"):
        monkeypatch.setattr(Compaction, verb, noting(verb, getattr(Compaction, verb)))
    ids = [f"ops-{number}" for number in range(MANAGEMENT_OF_ONE_KEY)]
    with serving() as live, ThreadPoolExecutor(len(ids) + 1) as pool:
        for each in ids:
            live.post(CHAT, {"messages": MESSAGES, "max_tokens": 8}, **{"X-Keepwarm-Agent": each})
        asked = [
            pool.submit(live.post, f"/v1/agents/{each}/compact", {"max_tokens": 8}) for each in ids
        ]
        try:
            wait_until(lambda: names["finish"] and len(names["warm"]) == len(ids))
            time.sleep(0.2)  # the other one is at the disk too, or waits for a permit
            assert pool.submit(live.get, "/v1/models").result(30).status_code == 200
        finally:
            may_end.set()
        for made in asked:
            assert made.result().status_code == 200, made.result().text
    assert all(name.startswith("keepwarm-prepare") for name in names["warm"])
    assert all(name.startswith("AnyIO") for name in names["finish"])


def test_requests_for_tokens_and_the_stop_wait_for_no_management(serving, tmp_path):
    """Nor does anything but the stop use the threads of the event loop."""
    (tmp_path / "shared").mkdir()
    with serving(remote=(tmp_path / "shared").as_uri()) as live:
        asyncio.run_coroutine_threadsafe(take_management_threads(), live.loop).result(60)
        live.loop.call_soon_threadsafe(live.loop.set_default_executor, RefusingExecutor(1))
        for path, body in ASKED.items():
            answer = live.post(path, {"model": "tiny", **body})
            assert answer.status_code == 200, (path, answer.text)
        live.loop.call_soon_threadsafe(live.loop.set_default_executor, ThreadPoolExecutor(1))

"""Liveness and readiness."""

import asyncio
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from keepwarm import config
from keepwarm.server.app import create_app
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models
from tests.kit.waiting import no_collection, wait_until

ENDLESS = {
    "messages": [{"role": "user", "content": "What is the answer?"}],
    "max_tokens": 12000,
    "logit_bias": {"2": -100},
}
SHORT = {"max_tokens": 2}


def test_it_lives_and_is_ready(live):
    for path in ("/health", "/health/live", "/health/ready"):
        answer = live.get(path)
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok"}


def test_it_tells_which_kernels_are_still_compiled_in_idle_time(live, monkeypatch):
    steps = {"run": lambda: (step for step in ()), "save": lambda: None}
    trials = SimpleNamespace(n_left=2, n_all=5, **steps)
    monkeypatch.setattr(live.host.engine, "idle_work", [trials])
    assert live.get("/health/ready").json() == {"status": "ok", "kernels": "3 of 5"}
    trials.n_left = 0
    assert live.get("/health/ready").json() == {"status": "ok"}


def test_it_waits_for_nothing_that_the_engine_does(live):
    """The engine is blocked, with a request waiting."""
    released = threading.Event()
    done = live.host.engine.call(lambda: released.wait(600))
    asking = threading.Thread(target=live.post, args=("/v1/chat/completions", ENDLESS | SHORT))
    asking.start()
    try:
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            assert httpx.get(f"{live.url}{path}", timeout=300).status_code == 200
        assert not done.done()
    finally:
        released.set()
        asking.join()


@pytest.mark.parametrize("path", ["/health/live", "/nowhere", "/openapi.json"])
def test_the_first_to_ask_waits_no_longer_than_the_second(path):
    """CPU time: while the event loop is busy, all clients wait."""
    settings = config.load({})
    app = create_app(Models(EngineHost(None, "none"), settings), settings)

    async def seconds():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            begun = time.thread_time()
            await client.get(path)
            return time.thread_time() - begun

    with no_collection():
        first, second = asyncio.run(seconds()), asyncio.run(seconds())
    assert first < second + 0.05


def test_it_is_not_ready_while_it_drains(serving):
    """Answers still run; a load balancer sends no new requests."""
    with serving() as live:
        asking = threading.Thread(target=live.post, args=("/v1/chat/completions", ENDLESS))
        asking.start()
        wait_until(lambda: live.host.engine.stats().decoding == 1)
        draining = threading.Thread(target=live.host.drain, args=(300,))
        draining.start()
        wait_until(lambda: live.get("/health/ready").status_code == 503)
        assert live.host.engine.stats().decoding == 1
        assert live.get("/health/live").status_code == 200
        for entry in live.host.engine.requests():
            live.host.engine.cancel(entry.number)
        draining.join()
        asking.join()


def test_it_is_not_ready_when_the_engine_is_not(serving):
    with serving() as live:
        live.host.engine.close()
        answer = live.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
        assert live.get("/health").status_code == 503
        assert live.get("/health/live").status_code == 200
        live.host.take()

"""One key's requests cannot keep another's from being prepared."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import httpx
import psutil
import pytest

from keepwarm import config
from keepwarm.models.load import load
from keepwarm.server.http.permits import LONG_BODY, PATHS, PrepareLimiter, prepare_threads
from tests.kit.checkpoints import CHATML, write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.conftest import serve

CHAT = "/v1/chat/completions"
SPINS = (
    "{% if spin is defined %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
N_ATTACKS = 12  # more than the threads of any pool here


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("model"), template=SPINS + CHATML)
    model = replace(load(str(path), config.load({}, home=None)), n_context=1 << 20)
    home = str(tmp_path_factory.mktemp("home"))
    settings = config.load(
        {"KEEPWARM_HOME": home, "KEEPWARM_API_KEYS": "attacker,victim"}, prepare_timeout_s=600.0
    )
    with serve(model, settings) as server:
        yield server


def endless():
    """A request whose template never ends; only its client can end it."""
    message = {"role": "user", "content": "the fox " * (LONG_BODY // 4)}
    options = {"chat_template_kwargs": {"spin": True}, "max_tokens": 1}
    return json.dumps({"messages": [message], **options}).encode()


@contextmanager
def attacking(live, n):
    """So many endless requests of one key, until the end of the block."""
    host, port = live.url.removeprefix("http://").split(":")
    body = endless()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer attacker\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with ExitStack() as links:
        for _ in range(n):
            link = links.enter_context(socket.create_connection((host, int(port))))
            link.sendall(head.encode() + body)
        yield


def forks(live):
    process = live.host.engine.preparer._sandbox._process._process
    if process is None:
        return []
    children = psutil.Process(process.pid).children()
    found = []
    for child in children:
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def ask(live, text, key="victim", path=CHAT):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{live.url}{path}", json=body, headers=headers, timeout=600)


def test_endless_requests_of_one_key_keep_no_other_waiting(live):
    """Long and short ones of the other are answered; those of the same key wait behind it."""
    with attacking(live, N_ATTACKS):
        wait_until(lambda: forks(live))
        assert ask(live, "the fox").status_code == 200
        counted = ask(live, "the fox " * LONG_BODY, path="/v1/messages/count_tokens")
        assert counted.json()["input_tokens"] > LONG_BODY
        assert ask(live, "the fox", "attacker").status_code == 200  # short, so it does not wait
        assert forks(live)
    wait_until(lambda: not forks(live))


WORK_S = 0.02


def work():
    end = time.thread_time() + WORK_S
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("on_loop", [True, False])
def test_beside_another_key_a_key_rests_after_a_long_body(on_loop):
    """For longer than it has kept the interpreter, on a thread or on the event loop."""
    began, ended = [], []

    async def app(scope, receive, send):
        if scope["state"]["owner"] == "victim":
            await asyncio.Event().wait()
        began.append(time.monotonic())
        await asyncio.sleep(0)
        work() if on_loop else await scope["state"]["slot"].build(work)
        ended.append(time.monotonic())

    async def ask(limiter, owner, n_bytes):
        bodies = [b" " * n_bytes]

        async def receive():
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop()}

        scope = {"type": "http", "method": "POST", "path": CHAT, "state": {"owner": owner}}
        await limiter(scope, receive, None)

    async def scenario():
        with prepare_threads() as threads:
            limiter = PrepareLimiter(app, config.load({}), threads)
            victim = asyncio.create_task(ask(limiter, "victim", 2))
            for _ in range(3):
                await ask(limiter, "attacker", LONG_BODY + 1)
            victim.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert all(
        after - before >= 2 * WORK_S for before, after in zip(ended, began[1:], strict=False)
    )
    assert len(began) == 3


def test_every_path_that_takes_turns_is_a_route():
    from keepwarm.server.app import ROUTERS

    posts = {route.path for router in ROUTERS for route in router.routes if "POST" in route.methods}
    assert posts >= PATHS - {"/mcp"}  # which is added where the setting says so
    managing = ("agents", "admin", "cancel", "conversations")  # no prompt comes there
    others = {path for path in posts - PATHS if not any(word in path for word in managing)}
    assert others == {"/v1/cache/clear", "/v1/cache/verify", "/api/show", "/api/pull"}

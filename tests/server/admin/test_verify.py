"""Verifying over HTTP says how far it is."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from keepwarm.errors import Cancelled
from keepwarm.server.admin.cache import Verification
from keepwarm.store.atomic import Files
from tests.kit.waiting import wait_until
from tests.server.admin.test_cache_api import ADMIN, ask, prompt


class SlowDrive(Files):
    """The file `last` is opened only after `spin`."""

    def __init__(self, last):
        self._last = last
        self.n_waiting = 0
        self._spins = threading.Event()

    def open(self, path):
        if path == self._last:
            self.n_waiting += 1
            assert self._spins.wait(300)
        return super().open(path)

    def spin(self):
        self._spins.set()


@contextmanager
def slow_drive(live):
    """The drive of a server with a few records, of which the last one verified is held back."""
    for _ in range(3):
        ask(live, prompt(), **{"X-Keepwarm-Cache": "durable"})
    records = live.host.engine.store.on_disk.disk.records
    found = live.settings.store.glob("blocks/*/*.safetensors")
    drive = SlowDrive(max(found, key=lambda path: path.name))
    fast, records.files = records.files, drive
    try:
        yield drive
    finally:
        drive.spin()
        records.files = fast


def test_a_stream_says_how_far_it_is(serving):
    options = {"json": {"stream": True}, "headers": ADMIN, "timeout": 300}
    with serving(admin_key="admin") as live, slow_drive(live) as drive:
        with httpx.stream("POST", f"{live.url}/v1/cache/verify", **options) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = (line for line in answer.iter_lines() if line)
            events = (json.loads(line.removeprefix("data: ")) for line in lines)
            under_way = next(event for event in events if event["n_bytes"])
            drive.spin()
            *_, result = events
        whole = live.post("/v1/cache/verify", {}, **ADMIN).json()
    assert under_way["object"] == "cache.verify.progress"
    assert 0 < under_way["n_bytes"] < under_way["total_bytes"] == whole["n_bytes"]
    assert result == whole


def test_a_client_that_leaves_ends_the_check(serving):
    with serving() as live, slow_drive(live) as drive:
        check = Verification(live.host.engine.store.on_disk, fix=False)

        async def leave():
            events = check.events()
            await anext(events)
            await events.aclose()
            drive.spin()

        asyncio.run(leave())
        with pytest.raises(Cancelled):
            check.run()


def test_stop_of_the_server_waits_for_no_check(serving):
    """Neither for one that streams nor for one that does not; both are held up by the drive."""
    with ExitStack() as drives, ThreadPoolExecutor(2) as clients:
        with serving(admin_key="admin") as live:
            drive = drives.enter_context(slow_drive(live))
            for stream in (False, True):
                clients.submit(live.post, "/v1/cache/verify", {"stream": stream}, **ADMIN)
            wait_until(lambda: drive.n_waiting == 2)
        assert drive.n_waiting == 2

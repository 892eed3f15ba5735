"""Many clients at once, many of which leave; nothing fails, nothing stays behind.

Some seconds here; five minutes with `--soak`, which prints what it has measured.
"""

import asyncio
import gc
import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

from keepwarm.engine.answer import Answer
from keepwarm.engine.jobs import Job
from tests.kit.waiting import wait_until
from tests.server.load_client import Seen, load
from tests.server.processes import ROOT, SMALL, served

WARM_UP = 0.4  # of the time
PROBE_S = 0.05
MIB = 1 << 20
GROWTH = 48 * MIB  # texts and tokens of recent prompts: two stores of 16 MiB each, and some slack
LATE_THREADS = 4  # pools start a thread when first they need it; a leak would be hundreds
BUDGETS = {"KEEPWARM_MEMORY_BYTES": str(8 * MIB), "KEEPWARM_DISK_BYTES": str(64 * MIB)}


class Sample(NamedTuple):
    """The server process at one moment."""

    rss: int
    threads: int


class Measured(NamedTuple):
    seen: dict
    health_s: list[float]  # ascending
    samples: list[Sample]
    after: Sample

    def health(self, share):
        return self.health_s[int(share * (len(self.health_s) - 1))]


def sample(process):
    return Sample(process.memory_info().rss, process.num_threads())


def under_load(server, n_clients, seconds):
    """Ask for its health for so long or longer; another process makes the load."""
    process = psutil.Process(server.pid)
    command = [sys.executable, "-m", "tests.server.load_client", server.url]
    health_s, samples = [], []
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as connection:
        asked(connection)
        n_files = process.num_fds()
        with subprocess.Popen(
            [*command, str(n_clients), str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as clients:
            while clients.poll() is None:
                health_s.append(asked(connection))
                samples.append(sample(process))
                time.sleep(PROBE_S)
            seen = json.load(clients.stdout)
        wait_until(lambda: process.num_fds() <= n_files)
        return Measured(seen, sorted(health_s), samples, sample(process))


def asked(connection):
    begun = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    return time.perf_counter() - begun


def check(measured, n_clients):
    """No error, and after it has warmed up the process grows no more."""
    assert measured.seen["wrong"] == {}
    assert Seen(**measured.seen).is_enough(n_clients)
    warm = measured.samples[int(WARM_UP * len(measured.samples)) :]
    quarter = len(warm) // 4
    early = max(each.rss for each in warm[:quarter])
    late = max(each.rss for each in warm[-quarter:])
    assert late - early < GROWTH
    threads = [each.threads for each in (*warm, measured.after)]
    assert max(threads) <= warm[0].threads + LATE_THREADS


@pytest.mark.parametrize(
    ("n_clients", "seconds"),
    [(32, 5), pytest.param(64, 300, marks=pytest.mark.soak)],
    ids=["short", "soak"],
)
def test_server_under_load_answers_all_and_grows_no_more(
    checkpoint, tmp_path, n_clients, seconds, record_property, capsys
):
    with served(checkpoint, tmp_path, command=SMALL, **BUDGETS) as server:
        measured = under_load(server, n_clients, seconds)
        server.process.terminate()
        assert server.process.wait(300) == 0
        assert server.process.stderr.read() == ""
    health = {f"p{100 * share:g}": round(1000 * measured.health(share), 1) for share in (0.5, 0.99)}
    record_property("health_ms", health)
    rss = [measured.samples[0].rss // MIB, measured.samples[-1].rss // MIB]
    with capsys.disabled():
        sys.stdout.write(f"\n{measured.seen}, /health ms {health}, RSS MiB {rss}\n")
    check(measured, n_clients)


def running_requests(server):
    stats = server.host.engine.stats()
    return stats.waiting + stats.prefilling + stats.decoding


def test_server_keeps_nothing_of_requests_that_ended(serving):
    """Neither answers nor jobs, tasks or threads, whether a client stayed or left."""

    def running(server):
        return {task for task in asyncio.all_tasks(server.loop) if not task.done()}

    def alive(kind):
        gc.collect()
        return sum(isinstance(each, kind) for each in gc.get_objects())

    with serving() as server:
        asyncio.run(load(server.url, 8, 0.5))  # everything is made that is made once
        wait_until(lambda: not running_requests(server))
        settled = [len(running(server)), threading.active_count(), alive(Answer), alive(Job)]
        seen = asyncio.run(load(server.url, 16, 1))
        wait_until(lambda: len(running(server)) <= settled[0])
        assert seen.wrong == {}
        assert seen.left
        wait_until(lambda: alive(Answer) <= settled[2] and alive(Job) <= settled[3])
        assert threading.active_count() <= settled[1] + 6  # of the pool that tokenises
        assert not running_requests(server)
        assert {use.name: use.n_bytes for use in server.host.engine.memory()}["batch"] == 0

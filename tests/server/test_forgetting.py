"""`keepwarm cache rm` and `clear` beside a running server: it forgets too."""

import json

import httpx
import pytest

from tests.cli import keepwarm_here
from tests.kit.waiting import wait_until
from tests.server.processes import served

LONG = "The quick brown fox jumps over the lazy dog. " * 30
DURABLE = {"X-Keepwarm-Cache": "durable"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(checkpoint, home):
    with served(checkpoint, home) as server:
        yield server


def say(server, text=LONG, **headers):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=300
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["keepwarm"]


def cache(home, *arguments):
    done = keepwarm_here("cache", *arguments, "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def in_memory(server):
    found = httpx.get(f"{server.url}/v1/cache", timeout=300).json()
    return found["live"]["entries"] + found["tiers"]["memory"]["blocks"]


def test_rm_is_known_to_the_next_request(server, home):
    """A durable one, which writes all that it reuses: it finds nothing to reuse."""
    say(server, **DURABLE, **{"X-Keepwarm-Agent": "ops"})
    assert say(server)["reused"]
    assert cache(home, "rm", "ops")["removed_blocks"] > 0
    after = say(server, **DURABLE)
    assert (after["reused"], after["durable"]) == ({}, True)
    assert after["recomputed"] == after["prompt_tokens"]
    assert cache(home, "ls") == []


@pytest.mark.parametrize("arguments", [("rm", "ops"), ("clear", "--yes")])
def test_an_idle_server_forgets_within_a_second_or_so(arguments, server, home):
    """Not because of a request: its writer thread looks every half second."""
    cache(home, "clear", "--yes")
    say(server, **DURABLE, **{"X-Keepwarm-Agent": "ops"})
    assert in_memory(server) > 0
    cache(home, *arguments)
    wait_until(lambda: not in_memory(server), 60)
    assert cache(home, "stats")["blocks"] == 0

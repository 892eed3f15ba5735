"""Two servers, one store: each reuses what the other wrote, and both forget what is deleted."""

import asyncio
import json

import httpx
import pytest

from tests.cli import keepwarm_here
from tests.kit.waiting import wait_until
from tests.server.processes import served
from tests.server.talks import DURABLE, begun, plain_bias, turns

N_TALKS = 2
LONG = "The quick brown fox jumps over the lazy dog. " * 30


@pytest.fixture(scope="module")
def plain(checkpoint):
    return plain_bias(checkpoint)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def pair(checkpoint, serving, home):
    """A process of its own, and a server in this one."""
    with served(checkpoint, home) as one, serving(home=home) as other:
        yield one, other


async def both(pair, talks, plain):
    """Half of the talks go on at each server, at the same time."""
    half = len(talks) // 2
    asked = (talks[:half], talks[half:])
    sides = zip(pair, asked, strict=True)
    found = await asyncio.gather(
        *(turns(server.url, some, plain, extra_headers=DURABLE) for server, some in sides)
    )
    return [*found[0], *found[1]]


def test_servers_on_one_store_go_on_with_what_the_other_wrote(pair, live, plain):
    """Talks change sides at every turn; what they cost is what one server would have asked."""
    talks = [begun(number) for number in range(N_TALKS)]
    wanted = [talks]
    for _ in range(3):
        wanted.append([talk for talk, _ in asyncio.run(turns(live.url, wanted[-1], plain))])

    first = asyncio.run(both(pair, talks, plain))
    second = asyncio.run(both(pair[::-1], [talk for talk, _ in first], plain))
    third = asyncio.run(both(pair, [talk for talk, _ in second], plain))
    for found, right in zip((first, second, third), wanted[1:], strict=True):
        assert [talk for talk, _ in found] == right
    before, after = first + second, second + third
    for (_, earlier), (_, later) in zip(before, after, strict=True):
        known = earlier.prompt_tokens + earlier.completion_tokens
        assert known <= later.prompt_tokens_details.cached_tokens < later.prompt_tokens


# `keepwarm cache rm` and `clear` beside them


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


def test_cache_rm_is_known_to_the_next_request(pair, home):
    """A durable one, which writes all that it reuses: it finds nothing to reuse."""
    server = pair[0]
    cache(home, "clear", "--yes")
    say(server, **DURABLE, **{"X-Keepwarm-Agent": "ops"})
    assert say(server)["reused"]
    assert cache(home, "rm", "ops")["removed_blocks"] > 0
    after = say(server, **DURABLE)
    assert (after["reused"], after["durable"]) == ({}, True)
    assert after["recomputed"] == after["prompt_tokens"]
    assert cache(home, "ls") == []


@pytest.mark.parametrize("arguments", [("rm", "ops"), ("clear", "--yes")])
def test_idle_servers_forget_what_is_deleted(arguments, pair, home):
    """Not because of a request: its writer thread looks every half second."""
    cache(home, "clear", "--yes")
    for server in pair:
        say(server, **DURABLE, **{"X-Keepwarm-Agent": "ops"})
        assert in_memory(server) > 0
    cache(home, *arguments)
    for server in pair:
        wait_until(lambda server=server: not in_memory(server), 60)
    assert cache(home, "stats")["blocks"] == 0

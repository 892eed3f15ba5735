"""Two servers, one store: each reuses what the other wrote; a port belongs to one server."""

import asyncio
import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from tests.server.processes import PROGRAM, served
from tests.server.talks import DURABLE, begun, plain_bias, turns

N_TALKS = 2


@pytest.fixture(scope="module")
def plain(checkpoint):
    return plain_bias(checkpoint)


@pytest.fixture(scope="module")
def pair(checkpoint, serving, tmp_path_factory):
    """A process of its own, and a server in this one."""
    home = tmp_path_factory.mktemp("shared")
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


def test_server_on_a_port_in_use_ends_with_one_sentence(pair, checkpoint, tmp_path):
    """One sentence and exit code 2, before a model is loaded; the server there goes on."""
    port = str(urlsplit(pair[0].url).port)
    command = [port if word == "0" else word for word in PROGRAM]
    answer = subprocess.run(
        [sys.executable, *command, str(checkpoint)],
        env={**os.environ, "KEEPWARM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert f"Port {port} on 127.0.0.1 is in use" in answer.stderr
    assert pair[0].process.poll() is None

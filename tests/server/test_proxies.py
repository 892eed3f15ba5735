"""The examples for nginx and HAProxy, as they are printed, in front of two servers."""

import re
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.kit.redis_server import free_port
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.soak  # neither is a Python package
FLEET = Path(__file__).parents[2] / "examples" / "fleet"
PROXIES = {
    "nginx": ("nginx.conf", lambda file: ["nginx", "-p", str(file.parent), "-c", str(file)]),
    "haproxy": ("haproxy.cfg", lambda file: ["haproxy", "-f", str(file)]),
}
NAME = "chat.example.org"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@contextmanager
def proxy(program, servers, directory):
    """The address of one with the example's configuration, but for its ports."""
    if shutil.which(program) is None:
        pytest.skip(f"needs `{program}`")
    name, command = PROXIES[program]
    ports = {"8080": str(free_port()), "8181": servers[0], "8182": servers[1]}
    text = re.sub(
        r"(?<=127\.0\.0\.1:)\d+", lambda found: ports[found[0]], (FLEET / name).read_text()
    )
    (directory / name).write_text(text)
    process = subprocess.Popen(command(directory / name))
    url = f"http://127.0.0.1:{ports['8080']}"
    try:
        wait_until(lambda: process.poll() is not None or answers(url))
        assert process.poll() is None
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url):
    try:
        return httpx.get(f"{url}/health/live", headers={"Host": NAME}).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("program", PROXIES)
def test_a_key_stays_on_one_server_and_moves_when_that_is_gone(serving, tmp_path, program):
    keys = [f"key{number}" for number in range(8)]
    with ExitStack() as stack:
        first = ExitStack()
        stack.enter_context(first)
        options = {"api_keys": ",".join(keys), "allowed_hosts": NAME}
        servers = [first.enter_context(serving(**options)), stack.enter_context(serving(**options))]
        ports = [live.url.rpartition(":")[2] for live in servers]
        url = stack.enter_context(proxy(program, ports, tmp_path))
        places = [place_of(url, servers, key) for key in keys]
        assert [place_of(url, servers, key) for key in keys] == places
        assert set(places) == {0, 1}, "both serve"
        assert ask(url, keys[0], host="other.example.org").status_code == 403
        with stream(url, keys[0]) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert b"[DONE]" in b"".join(answer.iter_raw())
        first.close()
        wait_until(lambda: all(ask(url, key).is_success for key in keys))


def ask(url, key, host=NAME):
    headers = {"Host": host, "Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/chat/completions", headers=headers, json=ASKED, timeout=60)


def stream(url, key):
    headers = {"Host": NAME, "Authorization": f"Bearer {key}"}
    body = ASKED | {"stream": True}
    return httpx.stream(
        "POST", f"{url}/v1/chat/completions", headers=headers, json=body, timeout=60
    )


def place_of(url, servers, key):
    """Which of the servers has answered."""
    before = [live.host.engine.stats().counters["finished"] for live in servers]
    assert ask(url, key).status_code == 200
    after = [live.host.engine.stats().counters["finished"] for live in servers]
    return [n != m for n, m in zip(before, after, strict=True)].index(True)

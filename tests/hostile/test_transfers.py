"""Bundles on their way: nothing in plain beside an encrypted store, nothing left, not too many."""

import io
import signal
import socket
import sqlite3
import sys
from base64 import b64encode
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.bundle import ArchiveReader
from keepwarm.server.admin.agents import MAX_OF_ONE_KEY
from tests.kit.checkpoints import write_checkpoint
from tests.kit.waiting import wait_until
from tests.server.processes import served

KEY = b64encode(bytes(range(32))).decode()
A, B = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
SMALL_BUFFER = 4096  # bytes that the system takes for a client that does not read


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of many layers, so that a bundle is larger than the buffers of a connection."""
    shape = {"num_hidden_layers": 12}
    return write_checkpoint(tmp_path_factory.mktemp("model"), shape=shape)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(checkpoint, home):
    """`keepwarm serve` with an encrypted store and two keys."""
    settings = {"KEEPWARM_ENCRYPTION_KEY": KEY, "KEEPWARM_API_KEYS": "a,b"}
    with served(checkpoint, home, **settings) as running:
        say(running.url, "mine", A, "the lazy dog " * 340)
        say(running.url, "yours", B, "hello")
        yield running


@pytest.fixture(scope="module")
def bundle(server):
    answer = httpx.get(f"{server.url}/v1/agents/mine/export", headers=A, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


def say(url, agent, key, text):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    headers = {"X-Keepwarm-Agent": agent, "X-Keepwarm-Cache": "durable", **key}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text


def connect(url, buffer=None):
    made = socket.socket()
    if buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(60)
    made.connect((urlsplit(url).hostname, urlsplit(url).port))
    return made


def begin_upload(url, data, n_bytes, agent="arriving"):
    """A client that has sent a part of a bundle, and then nothing."""
    client = connect(url)
    head = (
        f"POST /v1/agents/import?id={agent} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer a\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    client.sendall(head.encode() + data[:n_bytes])
    return client


def begin_download(url, agent="mine", key="a"):
    """A client that reads the first bytes of an answer and no more; the status too."""
    client = connect(url, SMALL_BUFFER)
    client.sendall(
        f"GET /v1/agents/{agent}/export HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {key}\r\n\r\n".encode()
    )
    return client, client.recv(2000)


def staged(home):
    return list((home / "store" / "tmp").glob("*/*.tmp"))


def reserved_bytes(home):
    """What the index counts as about to be written."""
    with closing(sqlite3.connect(f"file:{home}/store/index.sqlite?mode=ro", uri=True)) as db:
        return db.execute("SELECT coalesce(sum(n_bytes), 0) FROM writes").fetchone()[0]


def agents(url):
    listed = httpx.get(f"{url}/v1/agents", headers=A, timeout=60).json()
    return [agent["id"] for agent in listed["data"]]


def secrets_in(bundle):
    """Bytes of the first records that only a store in plain would hold."""
    archive = iter(ArchiveReader(io.BytesIO(bundle), len(bundle)))
    next(archive).read()
    first = next(archive).read()
    return [first[-200:-100], first[100:200]]


def holding(home, secret):
    files = (path for path in home.rglob("*") if path.is_file())
    return [path for path in files if secret in path.read_bytes()]


def test_an_upload_is_encrypted_counted_and_gone_with_its_client(server, home, bundle):
    client = begin_upload(server.url, bundle, len(bundle) * 3 // 4)
    wait_until(lambda: len(staged(home)) >= 5)
    for secret in secrets_in(bundle):
        assert secret in bundle
        assert holding(home, secret) == []
    assert reserved_bytes(home) >= sum(path.stat().st_size for path in staged(home)) > 0
    client.close()
    wait_until(lambda: not staged(home) and not reserved_bytes(home))
    assert "arriving" not in agents(server.url)


def test_a_download_is_in_no_file_and_ends_with_its_client(server, home, bundle):
    files = set(home.rglob("*"))
    client, began = begin_download(server.url)
    assert b" 200 " in began
    assert set(home.rglob("*")) <= files
    if sys.platform == "linux":
        fds = [str(fd.readlink()) for fd in Path(f"/proc/{server.pid}/fd").iterdir()]
        assert not [name for name in fds if name.endswith("(deleted)")]
    client.close()
    again = httpx.get(f"{server.url}/v1/agents/mine/export", headers=A, timeout=60)
    assert again.content == bundle


def test_one_key_has_only_so_many_bundles_under_way(server, bundle):
    with ExitStack() as held:
        for _ in range(MAX_OF_ONE_KEY):
            client, began = begin_download(server.url)
            assert b" 200 " in began
            held.enter_context(client)
        refused = httpx.get(f"{server.url}/v1/agents/mine/export", headers=A, timeout=60)
        assert refused.status_code == 429
        assert "bundles under way" in refused.json()["error"]["message"]
        upload = httpx.post(
            f"{server.url}/v1/agents/import?id=new", content=bundle, headers=A, timeout=60
        )
        assert upload.status_code == 429
        others = httpx.get(f"{server.url}/v1/agents/yours/export", headers=B, timeout=60)
        assert others.status_code == 200
    wait_until(lambda: begins(server.url))


def begins(url):
    client, began = begin_download(url)
    client.close()
    return b" 200 " in began


def test_a_start_deletes_what_a_killed_server_had_staged(server, bundle, home):
    """The last one: it kills the server of all."""
    client = begin_upload(server.url, bundle, len(bundle) * 3 // 4)
    wait_until(lambda: len(staged(home)) >= 5)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    client.close()
    assert len(staged(home)) >= 5, "it had no time to tidy up"
    assert reserved_bytes(home) > 0
    with AgentStore(home / "store", secret=KEY) as store:
        assert staged(home) == []
        assert reserved_bytes(home) == 0
        names = {agent.id.rpartition(".")[2] for agent in store.agents.all()}
        assert names == {"mine", "yours"}

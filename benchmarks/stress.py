"""`python -m benchmarks.stress`: 1,000 mixed requests to a server on loopback, then its health.

Eight clients send what agents send: new chats, the same again, further turns, streams that are read
and streams that are left, every API, raw prompts, exact and quantised, agents that are forked,
pinned and deleted, and requests that are refused. Memory and disk budgets are small, so that blocks
are evicted all the time. No cache error, and memory that stays bounded.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import psutil
import typer

from benchmarks.requests.measure import describe_machine

CLIENTS = 8
SETTLED = 200  # requests after which memory is compared with the end
ADMIN = "stress-admin"
SETTINGS = {
    "KEEPWARM_ADMIN_KEY": ADMIN,
    "KEEPWARM_MEMORY_BYTES": str(4 << 20),
    "KEEPWARM_DISK_BYTES": str(8 << 20),
    "KEEPWARM_LOG_LEVEL": "warning",
}
WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("and", "then", "sleeps", "in", "its", "warm", "den"),
)
CACHE_ERRORS = ("keepwarm_failed_restores_total", "keepwarm_restore_failures_total")


class Served(NamedTuple):
    url: str
    process: psutil.Process
    log: Path


@contextmanager
def serve(model: str, home: Path) -> Iterator[Served]:
    """A server process with small budgets."""
    log = home / "log"
    command = [sys.executable, "-m", "keepwarm", "serve", "--port", "0", "--model", model]
    environ = {**os.environ, "KEEPWARM_HOME": str(home), **SETTINGS}
    with log.open("w") as said:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=said, text=True
        )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: {log.read_text()}")
        yield Served(found[0], psutil.Process(process.pid), log)
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
        process.wait()


class Client:
    """One client with conversations of its own."""

    def __init__(self, url: str, number: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._random = random.Random(number)  # noqa: S311, it picks requests
        self._name = f"client{number}"
        self._chat: list[dict[str, str]] = []
        self.statuses: Counter[str] = Counter()

    def ask(self) -> None:
        """One request of a kind at random."""
        kind = self._random.choice(list(KINDS))
        self.statuses[f"{kind} {KINDS[kind](self)}"] += 1

    def text(self, n: int = 60) -> str:
        return " ".join(self._random.choices(WORDS, k=n))

    def post(self, path: str, body: dict[str, Any], **headers: str) -> int:
        asked = {"temperature": 0, **body}
        return self._http.post(path, json=asked, headers=headers).status_code

    def chat(self, **more: Any) -> int:
        """A further turn; after some of them a new conversation."""
        if len(self._chat) > 8:
            self._chat = []
        self._chat.append({"role": "user", "content": self.text()})
        body = {"messages": self._chat, "max_tokens": 8, "temperature": 0, **more}
        answer = self._http.post("/v1/chat/completions", json=body)
        if answer.status_code == 200:
            self._chat.append(answer.json()["choices"][0]["message"] | {"role": "assistant"})
        return answer.status_code

    def again(self) -> int:
        body = {"messages": self._chat or [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        return self.post("/v1/chat/completions", body)

    def stream(self, *, leaves: bool = False) -> int:
        body = {"messages": [{"role": "user", "content": self.text()}], "stream": True}
        options = {"max_tokens": 600 if leaves else 8, "logit_bias": {"2": -100}}
        with self._http.stream("POST", "/v1/chat/completions", json=body | options) as answer:
            for _ in answer.iter_raw():
                if leaves:
                    break
            return answer.status_code

    def agent(self) -> int:
        """Speak as an agent, fork it, pin the fork, delete it."""
        body = {"messages": [{"role": "user", "content": self.text()}], "max_tokens": 2}
        name, fork = self._name, f"{self._name}-fork"
        headers = {"x-keepwarm-agent": name, "x-keepwarm-cache": "durable"}
        status = self.post("/v1/chat/completions", body, **headers)
        self.post(f"/v1/agents/{name}/fork", {"id": fork})
        for pinned in (True, False):
            self._http.patch(f"/v1/agents/{fork}", json={"pinned": pinned})
        self._http.delete(f"/v1/agents/{fork}")
        return status

    def policy(self) -> int:
        policy = self._random.choice(["read-only", "ephemeral", "no-store", "durable"])
        body = {"messages": [{"role": "user", "content": self.text(20)}], "max_tokens": 2}
        return self.post("/v1/chat/completions", body, **{"x-keepwarm-cache": policy})

    def messages(self) -> int:
        body = {"messages": [{"role": "user", "content": self.text()}], "max_tokens": 4}
        return self.post("/v1/messages", body | {"model": "m"})

    def responses(self) -> int:
        return self.post("/v1/responses", {"input": self.text(), "max_output_tokens": 4})

    def completion(self) -> int:
        prompts = [self._random.choices(range(10, 90), k=40) for _ in range(2)]
        return self.post("/v1/completions", {"prompt": prompts, "max_tokens": 3})

    def bounded(self) -> int:
        body = {"messages": [{"role": "user", "content": self.text()}], "max_tokens": 4}
        return self.post("/v1/chat/completions", body | {"keepwarm": {"kv": {"max_kv_size": 32}}})

    def refused(self) -> int:
        return self.post("/v1/chat/completions", {"messages": "no list"})

    def lookup(self) -> int:
        return self.post("/v1/cache/lookup", {"messages": [{"role": "user", "content": "Hi"}]})


KINDS: dict[str, Callable[[Client], int]] = {
    "turn": Client.chat,
    "explained": lambda client: client.chat(keepwarm={"explain": True}),
    "again": Client.again,
    "stream": Client.stream,
    "left stream": lambda client: client.stream(leaves=True),
    "agent": Client.agent,
    "policy": Client.policy,
    "messages": Client.messages,
    "responses": Client.responses,
    "completion": Client.completion,
    "bounded": Client.bounded,
    "refused": Client.refused,
    "lookup": Client.lookup,
}


def send(url: str, n_requests: int, first: int) -> Counter[str]:
    """So many requests by all clients together; how many of each kind had which status."""
    clients = [Client(url, first + number) for number in range(CLIENTS)]
    left = iter(range(n_requests))
    lock = threading.Lock()

    def work(client: Client) -> None:
        while True:
            with lock:
                if next(left, None) is None:
                    return
            with suppress(httpx.RemoteProtocolError):
                client.ask()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum((client.statuses for client in clients), Counter())


def metrics(url: str) -> dict[str, float]:
    """Every sample by its name and labels."""
    text = httpx.get(f"{url}/metrics", headers={"x-api-key": ADMIN}, timeout=600).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def health(served: Served) -> dict[str, Any]:
    """What has gone wrong with the cache, all of it counted by the server."""
    found = metrics(served.url)
    admin = {"x-api-key": ADMIN}
    report = httpx.post(f"{served.url}/v1/cache/verify", json={}, headers=admin, timeout=600).json()
    saved = httpx.get(f"{served.url}/v1/dashboard/saved", headers=admin, timeout=600).json()
    # A record that was evicted between the plan and the reading is no error: it is planned anew.
    faults = {
        name: value
        for name, value in found.items()
        if name.startswith(CACHE_ERRORS) and value and 'reason="missing"' not in name
    }
    return {
        "cache_errors": faults,
        "failed_saves": saved["health"]["failed_saves"],
        "bad_records": len(report["bad"]),
        "records": report["records"],
        "failed_answers": found['keepwarm_answers_total{outcome="failed"}'],
        "evicted_meanwhile": found['keepwarm_failed_restores_total{reason="missing"}'],
        "evictions": {
            tier: found[f'keepwarm_evictions_total{{tier="{tier}"}}']
            for tier in ("live", "memory", "disk")
        },
        "hit_rate": saved["hit_rate"],
        "hit_rate_from_turn_2": saved["hit_rate_from_turn_2"],
        "log_lines": len(served.log.read_text().splitlines()),
    }


def memory(served: Served) -> dict[str, float]:
    """Resident memory, what of it are live caches, which have a budget, and memory without them."""
    live = metrics(served.url)['keepwarm_kept_bytes{tier="live"}']
    used = served.process.memory_info().rss
    httpx.post(f"{served.url}/v1/cache/clear", json={}, headers={"x-api-key": ADMIN}, timeout=600)
    at_rest = served.process.memory_info().rss
    return {"used_bytes": used, "live_bytes": live, "at_rest_bytes": at_rest}


def run(model: str, n_requests: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory, serve(model, Path(directory)) as served:
        statuses = send(served.url, min(SETTLED, n_requests), first=0)
        settled = memory(served)
        statuses += send(served.url, n_requests - SETTLED, first=CLIENTS)
        found = health(served)
        print(served.log.read_text(), file=sys.stderr, end="")
        ended = memory(served)
        return {
            "requests": n_requests,
            "statuses": dict(sorted(statuses.items())),
            **found,
            "memory": {f"after {SETTLED}": settled, "at the end": ended},
            "growth_at_rest": round(ended["at_rest_bytes"] / settled["at_rest_bytes"] - 1, 4),
        }


def main(
    model: Annotated[str, typer.Option(help="Model name or directory.")] = "smollm2",
    requests: Annotated[int, typer.Option(help="How many.")] = 1000,
    save: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Send mixed requests to a server, and print what its cache says afterwards."""
    when = datetime.now(UTC).date().isoformat()
    result = {"date": when, "machine": describe_machine(), **run(model, requests)}
    text = json.dumps(result, indent=1, default=str)
    if save is not None:
        save.write_text(text + "\n")
    print(text)
    is_sound = not (result["cache_errors"] or result["failed_saves"] or result["bad_records"])
    raise typer.Exit(0 if is_sound and not result["failed_answers"] else 1)


if __name__ == "__main__":
    typer.run(main)

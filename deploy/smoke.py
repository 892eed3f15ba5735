#!/usr/bin/env python3
"""Smoke test of a running server; exit code 1 at the first failed check.

Needs only Python. The key is read from a file or from KEEPWARM_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

TIMEOUT_S = 120


class CheckFailed(Exception):
    """A check failed; the message says why."""


class Server:
    def __init__(self, url: str, key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        # Unique in every run, so that the first request is cold and the second warm.
        run = f"Smoke test {uuid.uuid4()}. " + "The quick brown fox jumps over the lazy dog. " * 8
        self.prompt = [{"role": "user", "content": run}]

    def get(self, path: str) -> str:
        return self._ask(path, None)

    def post(self, path: str, body: object) -> str:
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> str:
        request = Request(self._url + path, body, self._headers)  # noqa: S310
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return answer.read().decode()
        except HTTPError as error:
            with error:
                raise CheckFailed(
                    f"{error.code}: {error.read(500).decode(errors='replace')}"
                ) from error
        except (URLError, OSError) as error:
            raise CheckFailed(f"no answer ({error})") from error


def check(is_true: bool, message: str) -> None:
    if not is_true:
        raise CheckFailed(message)


def live(server: Server) -> None:
    server.get("/health/live")


def ready(server: Server) -> None:
    server.get("/health/ready")


def models(server: Server) -> None:
    check(bool(name_of(server)), "the model has no name")


def name_of(server: Server) -> str:
    return json.loads(server.get("/v1/models"))["data"][0]["id"]


def chat(server: Server) -> None:
    body = {"messages": server.prompt, "max_tokens": 8, "temperature": 0}
    answer = json.loads(server.post("/v1/chat/completions", body))
    check(answer["usage"]["completion_tokens"] > 0, "the answer is empty")


def warm(server: Server) -> None:
    body = {"messages": server.prompt, "max_tokens": 8, "temperature": 0}
    usage = json.loads(server.post("/v1/chat/completions", body))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    check(cached == usage["prompt_tokens"] - 1, f"{cached} of {usage['prompt_tokens']} were warm")


def stream(server: Server) -> None:
    body = {"messages": server.prompt, "max_tokens": 8, "temperature": 0, "stream": True}
    frames = server.post("/v1/chat/completions", body)
    check(frames.endswith("data: [DONE]\n\n"), "the stream did not end with [DONE]")


def messages(server: Server) -> None:
    body = {"model": name_of(server), "messages": server.prompt, "max_tokens": 8, "temperature": 0}
    answer = json.loads(server.post("/v1/messages", body))
    check(answer["usage"]["output_tokens"] > 0, "the answer is empty")


def lookup(server: Server) -> None:
    found = json.loads(server.post("/v1/cache/lookup", {"messages": server.prompt}))
    check(max(found["warm"].values()) > 0, "the prompt is not warm after two requests")


def metrics(server: Server) -> None:
    check("keepwarm_ready 1.0" in server.get("/metrics"), "the engine is not ready")


CHECKS: tuple[Callable[[Server], None], ...] = (
    live, ready, models, chat, warm, stream, messages, lookup, metrics,
)  # fmt: skip


def wait(server: Server, seconds: float) -> None:
    """Return when the server is ready or the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            ready(server)
            return
        except CheckFailed:
            time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8181")
    parser.add_argument("--key-file", type=Path, help="file of API keys; the first is used")
    parser.add_argument(
        "--wait", type=float, default=0, help="seconds to wait for the server to become ready"
    )
    given = parser.parse_args()
    key = os.environ.get("KEEPWARM_API_KEY", "")
    if given.key_file:
        key = first_key(given.key_file)
    server = Server(given.url, key)
    wait(server, given.wait)
    return run(server)


def first_key(file: Path) -> str:
    """Lines are keys, or `name = key`."""
    try:
        return file.read_text().strip().splitlines()[0].split()[-1]
    except (OSError, ValueError, IndexError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        sys.exit(f"{file} has no key that can be read{why}; name a file of API keys.")


def run(server: Server) -> int:
    for each in CHECKS:
        begun = time.perf_counter()
        try:
            each(server)
        except (CheckFailed, KeyError, IndexError, ValueError) as error:
            print(f"bad  {each.__name__}: {error or type(error).__name__}")
            return 1
        print(f"ok   {each.__name__} ({1000 * (time.perf_counter() - begun):.0f} ms)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A `keepwarm serve` process that can be killed and started again, and its log of requests."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from tests.server.processes import served

SETTLED_S = 30
QUIET_S = 0.5  # from the end of an answer to its line in the log
NOT_RECORDED: dict[str, Any] = {"n_tokens": 0, "turns": [], "branches": []}
TIERS = ("live", "memory", "disk")


@dataclass(frozen=True)
class Asked:
    """One request, as the server's log has it."""

    path: str
    agent: str
    prompt: int
    reused: dict[str, int]
    computed: int
    answer: int

    @classmethod
    def of(cls, line: dict[str, Any]) -> Self:
        return cls(
            path=line["path"],
            agent=line["agent"],
            prompt=line["prompt_tokens"],
            reused={tier: line[tier] for tier in TIERS if line[tier]},
            computed=line["computed"],
            answer=line["answer_tokens"],
        )

    @property
    def end(self) -> int:
        """Tokens of the conversation after its answer."""
        return self.prompt + self.answer


class Answered(NamedTuple):
    asked: list[Asked]
    refused: list[dict[str, Any]]  # lines of the log


def _is_refused(line: dict[str, Any]) -> bool:
    """Also in a stream that has begun: Codex is told so."""
    in_stream = line.get("path") == "/v1/responses" and "prompt_tokens" not in line
    return in_stream or line.get("status", 200) >= 400


class Server:
    """One store, and the process that serves it at the moment."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._log = folder / "log"
        self._n_read = 0
        self._process = ExitStack()
        self.url = ""

    def start(self, **environ: str) -> None:
        log = self._process.enter_context(self._log.open("a"))
        settings = {"KEEPWARM_LOG_LEVEL": "info", "KEEPWARM_LOG_FORMAT": "json", **environ}
        running = served(self._checkpoint, self._folder / "home", log=log, **settings)
        self.url = self._process.enter_context(running).url

    def kill(self) -> None:
        """As `kill -9` does."""
        self._process.close()

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        answer = httpx.post(self.url + path, json=body, headers=headers, timeout=300)
        assert answer.is_success, answer.text
        return answer.json()

    def asked(self) -> list[Asked]:
        """The requests since the last call that have a prompt; any that failed raises."""
        found = self.answered()
        assert not found.refused, found.refused
        return found.asked

    def answered(self) -> Answered:
        """The requests since the last call, with those that failed."""
        while self.get("/v1/dashboard/now")["running"]:
            time.sleep(0.1)
        time.sleep(QUIET_S)
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        new, self._n_read = lines[self._n_read :], len(lines)
        refused = [line for line in new if _is_refused(line)]
        return Answered([Asked.of(line) for line in new if "prompt_tokens" in line], refused)

    def settle(self, agent: str, n_tokens: int) -> dict[str, Any]:
        """The agent as soon as it has so many tokens, or as it is after a while.

        It is recorded when its blocks are on disk, a moment after its answer.
        """
        deadline = time.monotonic() + SETTLED_S
        while (shown := self._agent(agent))["n_tokens"] != n_tokens:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return shown

    def _agent(self, agent: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/v1/agents/{agent}", timeout=60)
        shown: dict[str, Any] = answer.json()
        return shown if answer.is_success else NOT_RECORDED

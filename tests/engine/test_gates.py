"""Gates over many requests, each in a process of its own: no cache errors, no growth, many hits."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepwarm.cache.opened import Budgets
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.engine.memory import INTERVAL_S
from keepwarm.engine.request import Result
from keepwarm.errors import Cancelled, EngineFailed
from tests.kit.engines import Exam, Models, ask, engine_on, memory, tokens_of
from tests.kit.runs import prompt_of

ROOT = Path(__file__).parents[2]
TALKS = 8
AT_ONCE = 6
LONGEST = 400  # tokens of a conversation, before it starts anew
CACHE = ("keepwarm.cache", "keepwarm.kv", "keepwarm.store", "keepwarm.engine.keeper",
         "keepwarm.engine.lane")  # fmt: skip
FAULT = 127  # a token that cannot be decoded
MIB = 1 << 20


class FaultyTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, tokens: list[int], **options: Any) -> str:
        if FAULT in tokens:
            raise ValueError("no such character")
        text: str = self._tokenizer.decode(tokens, **options)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


@dataclass
class Turn:
    talk: int
    prompt: list[int]
    answer: Answer
    fails: bool
    cancel_after: int | None  # events


@dataclass
class Load:
    """Conversations that take turns at random, some of them cancelled, some of them broken."""

    engine: Engine
    exam: Exam
    random: random.Random
    tokens: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[int]] = field(default_factory=dict)
    n_prompt: int = 0  # from turn 2 on
    n_cached: int = 0
    n_cancelled: int = 0
    n_failed: int = 0

    def run(self, n_requests: int) -> None:
        running: deque[Turn] = deque()
        for number in range(n_requests):
            if len(running) == AT_ONCE:
                self.finish(running.popleft())
            talk = self.random.choice([i for i in range(TALKS) if not _in(running, i)])
            running.append(self.ask(talk, number))
        while running:
            self.finish(running.popleft())

    def ask(self, talk: int, number: int) -> Turn:
        said = self.tokens.setdefault(talk, [])
        if not said or len(said) > LONGEST:
            said = self.tokens[talk] = _clean(150, number)
        prompt = self.again.pop(talk, None)  # whoever got no answer asks once more
        prompt = prompt or [*said, *_clean(self.random.randint(2, 9), number)]
        fate = self.random.random()
        wishes: dict[str, Any] = {"logit_bias": {FAULT: -100.0}}
        if fails := fate < 0.1:
            wishes["logit_bias"] = {FAULT: 100.0}
        cancel_after = self.random.randint(0, 6) if 0.1 <= fate < 0.3 else None
        n = self.random.randint(2, 6)
        logprobs = 5 if number % 10 == 0 else None
        answer = self.engine.submit(ask(prompt, n, top_logprobs=logprobs, **wishes))
        return Turn(talk, prompt, answer, fails, cancel_after)

    def finish(self, turn: Turn) -> None:
        try:
            result = self.result_of(turn)
        except Cancelled:
            self.n_cancelled += 1
            self.again[turn.talk] = turn.prompt
        except EngineFailed:
            assert turn.fails, "a request failed that had no fault"
            self.n_failed += 1
            self.again[turn.talk] = turn.prompt
        else:
            self.note(turn, result)

    def result_of(self, turn: Turn) -> Result:
        if turn.cancel_after is None:
            return turn.answer.result()
        for _, _ in zip(range(turn.cancel_after), turn.answer, strict=False):
            continue
        turn.answer.cancel()
        list(turn.answer)
        raise Cancelled("It had ended before.")

    def note(self, turn: Turn, result: Result) -> None:
        if len(turn.prompt) > 170:
            self.n_prompt += len(turn.prompt) - 1  # the last token is always fed
            self.n_cached += result.receipt.cached_tokens
        choice = result.choices[0]
        if choice.tokens[0].logprob is not None:
            self.exam.add(turn.prompt, choice)
        self.tokens[turn.talk] = [*turn.prompt, *tokens_of(choice)]


def at_rest(engine: Engine) -> int:
    """Bytes of the process, as the system counts them, once nothing runs or waits for the disk."""
    engine.settle()
    engine.call(lambda: None).result()  # it rests after the writer does
    time.sleep(2 * INTERVAL_S)  # its watcher has looked
    return psutil.Process().memory_info().rss


def _in(running: deque[Turn], talk: int) -> bool:
    return any(turn.talk == talk for turn in running)


def _clean(n_tokens: int, seed: int) -> list[int]:
    return [token % FAULT for token in prompt_of(n_tokens, seed)]


class Complaints(logging.Handler):
    """Counts what the cache says when a record is bad or a restore or a save fails."""

    n = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n += record.name.startswith(CACHE) and record.levelno >= logging.WARNING


def load(architecture: str, n_requests: int, home: Path) -> dict[str, Any]:
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    models = Models(home / "models")
    model = models.of(architecture)
    model = replace(model, tokenizer=FaultyTokenizer(model.tokenizer))
    # All of it is full after 200 requests; what is talked about fits on disk.
    budgets = Budgets(
        memory_bytes=8 * MIB, queue_bytes=8 * MIB, disk_bytes=20 * MIB, min_free_disk_bytes=0
    )
    limits = memory(live_bytes=4 * MIB, buffer_active_bytes=16 * MIB)
    exam = Exam(models.module(architecture), without=FAULT)
    with engine_on(model, home, budgets=budgets, memory=limits) as engine:
        work = Load(engine, exam, random.Random(1))
        work.run(200)
        at_200 = at_rest(engine)
        work.run(n_requests - 200)
        at_last = at_rest(engine)
        stats = engine.stats()
        lane = engine.call(lambda: engine._lanes.of(engine.config.kv, "")).result()
        restore_failures = lane.manager.restore_failures
    tiers = stats.tiers.values()
    return {
        "compared": exam.check(),
        "hit_rate": work.n_cached / work.n_prompt,
        "rss_mib": [round(n_bytes / MIB, 1) for n_bytes in (at_200, at_last)],
        "growth": at_last / at_200 - 1,
        "cancelled": work.n_cancelled / n_requests,
        "failed": work.n_failed / n_requests,
        "wrongly_failed": stats.counters["failed"] - work.n_failed,
        "cache_errors": {
            "saves": stats.counters["failed_saves"],
            "told": complaints.n,
            "writes": stats.writes.failed,
            "tiers": sum(tier.errors + tier.quarantined for tier in tiers),
        },
        # Evicted between the plan and the reading: a miss, which the plan is made again without.
        "evicted_meanwhile": restore_failures,
        "rebuilt": stats.counters["rebuilt_batches"],
    }


def in_a_process(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.test_gates", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def hold(found: dict[str, Any]) -> None:
    assert set(found["cache_errors"].values()) == {0}
    assert found["wrongly_failed"] == 0
    assert found["rebuilt"] == 0
    assert found["hit_rate"] > 0.95
    assert found["growth"] < 0.05
    assert found["cancelled"] > 0.1
    assert found["failed"] > 0.05
    assert found["compared"] > 20


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next"])
def test_mixed_requests(tmp_path, architecture):
    """S0-61, S0-71, S0-74, D8: the gates of the long run, over fewer requests."""
    hold(in_a_process(tmp_path, "load", architecture, "300"))


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next"])
def test_a_thousand_mixed_requests(tmp_path, architecture):
    """S0-61, S0-71, S0-74: zero cache errors, RSS within 5 % from the 200th to the last request."""
    hold(in_a_process(tmp_path, "load", architecture, "1000"))


def peaks(architecture: str, home: Path) -> dict[str, Any]:
    """What a conversation takes at most when it is computed, and when it comes from disk."""
    import mlx.core as mx

    models = Models(home / "models")
    model, prompt = models.of(architecture), prompt_of(3000)
    found = {}
    for name in ("fresh", "restored"):
        with engine_on(model, home, budgets=Budgets(memory_bytes=0, min_free_disk_bytes=0)) as e:
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            receipt = e.submit(ask(prompt, 2)).result().receipt
            found[name] = mx.get_peak_memory() - before
            found[f"{name}_cached"] = receipt.cached_tokens
    return found


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_restored_conversation_takes_no_more_memory(tmp_path, architecture):
    """S0-73: less than a tenth over a fresh one."""
    found = in_a_process(tmp_path, "peaks", architecture)
    assert (found["fresh_cached"], found["restored_cached"]) == (0, 2999)
    assert found["restored"] < 1.1 * found["fresh"]


def main(home: str, what: str, architecture: str, *numbers: str) -> None:
    if what == "load":
        found = load(architecture, int(numbers[0]), Path(home))
    else:
        found = peaks(architecture, Path(home))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Gates over many requests, each in a process of its own: no cache errors, no growth, many hits."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepwarm.cache.store import Budgets
from keepwarm.device.pressure import INTERVAL_S
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import Cancelled, EngineFailed
from keepwarm.text.request import Result
from tests.engine.test_faults import (
    MARKED,
    MARKER,
    UNMARKED,
    Faulty,
    FaultyTokenizer,
    WithRule,
)
from tests.kit.engines import Exam, Models, ask, engine_on, memory, tokens_of
from tests.kit.runs import prompt_of

ROOT = Path(__file__).parents[2]
TALKS = 8
AT_ONCE = 6
LONGEST = 400  # tokens of a conversation, before it starts anew
CACHE = ("keepwarm.cache", "keepwarm.kv", "keepwarm.store", "keepwarm.engine.lane")
FAULT = MARKER
ENDING = ("prompt", "rule", "text")  # faults that end their own request
FAULTS = (*ENDING, "step")  # and one that everybody survives
MIB = 1 << 20


class Gated(Faulty):
    """A model that fails on a prompt with `FAULT` in it, and in a set number of steps."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.n_steps = 0  # that are still to fail
        self.n_failed = 0
        self.fault = self._fault

    def _fault(self, inputs: Any, _: Any) -> None:
        n_rows, n_tokens = inputs.shape
        if n_tokens > 1 and FAULT in inputs[0].tolist():
            raise ValueError("a kernel failed")
        if n_rows > 1 and self.n_steps:
            self.n_steps, self.n_failed = self.n_steps - 1, self.n_failed + 1
            raise RuntimeError("out of memory")


@dataclass
class Turn:
    talk: int
    prompt: list[int]
    answer: Answer
    fault: str = ""


@dataclass
class Load:
    """Conversations that take turns at random, some of them cancelled, some of them broken."""

    engine: Engine
    exam: Exam
    random: random.Random
    tokens: dict[int, list[int]] = field(default_factory=dict)
    again: dict[int, list[int]] = field(default_factory=dict)
    fates: list[str] = field(default_factory=list)  # of those that come next
    failed: Counter[str] = field(default_factory=Counter)  # by their fault
    n_prompt: int = 0  # from turn 2 on
    n_cached: int = 0
    n_cancelled: int = 0

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
        fate = self.fate()
        if fate == "cancelled":
            return Turn(talk, prompt, self.cancelled(prompt))
        if fate in FAULTS:
            return Turn(talk, prompt, self.faulty(prompt, fate), fate)
        logprobs = 5 if number % 10 == 0 else None
        request = ask(prompt, self.random.randint(2, 6), top_logprobs=logprobs, logit_bias=UNMARKED)
        return Turn(talk, prompt, self.engine.submit(request))

    def fate(self) -> str:
        """Of forty, each fault befalls one, and a few more than a fifth are cancelled."""
        if not self.fates:
            self.fates = [*ENDING, *["cancelled"] * 10, *["answered"] * 26]
            self.random.shuffle(self.fates)
            self.fates.append("step")  # the first: enough come after it to run in one batch
        return self.fates.pop()

    def cancelled(self, prompt: list[int]) -> Answer:
        """While it waits, in prefill or in decode; its answer is too long to be finished."""
        answer = self.engine.submit(ask(prompt, 1000, top_logprobs=None, logit_bias=UNMARKED))
        for _, _ in zip(range(self.random.randint(0, 6)), answer, strict=False):
            continue
        answer.cancel()
        return answer

    def faulty(self, prompt: list[int], fault: str) -> Answer:
        """Fails in its prompt, in a rule, in its text, or in a step of the whole batch."""
        agent = "stuck" if fault == "rule" else None
        bias = MARKED if fault == "text" else UNMARKED
        if fault == "prompt":
            prompt = [*prompt, FAULT, FAULT, FAULT, 1]
        if fault == "step":
            self.engine.model.module.n_steps += 1
        request = ask(prompt, 6, top_logprobs=None, logit_bias=bias, agent=agent)
        return self.engine.submit(request)

    def finish(self, turn: Turn) -> None:
        try:
            result = turn.answer.result()
        except Cancelled:
            self.n_cancelled += 1
            self.again[turn.talk] = turn.prompt
        except EngineFailed:
            assert turn.fault in ENDING, "a request failed that had no fault"
            self.failed[turn.fault] += 1
            self.again[turn.talk] = turn.prompt
        else:
            assert turn.fault not in ENDING, "a fault went unnoticed"
            self.note(turn, result)

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
    engine.wait_until_saved()
    engine.call(lambda: None).result()  # it rests after the writer does
    time.sleep(2 * INTERVAL_S)  # its watcher has looked
    return psutil.Process().memory_info().rss


def _in(running: deque[Turn], talk: int) -> bool:
    return any(turn.talk == talk for turn in running)


def _clean(n_tokens: int, seed: int) -> list[int]:
    return [token % FAULT for token in prompt_of(n_tokens, seed)]


class Complaints(logging.Handler):
    """Counts log lines of the cache about bad records, failed restores and failed saves."""

    n = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.n += record.name.startswith(CACHE) and record.levelno >= logging.WARNING


def load(architecture: str, n_requests: int, home: Path) -> dict[str, Any]:
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    models = Models(home / "models")
    model = models.of(architecture)
    module = Gated(model.module.model)
    model = replace(model, module=module, tokenizer=FaultyTokenizer(model.tokenizer))
    # All of it is full after 200 requests; what is talked about fits on disk.
    budgets = Budgets(
        memory_bytes=8 * MIB, queue_bytes=8 * MIB, disk_bytes=20 * MIB, min_free_disk_bytes=0
    )
    limits = memory(live_bytes=4 * MIB, buffer_active_bytes=16 * MIB)
    exam = Exam(models.module(architecture), without=FAULT)
    with engine_on(model, home, engine_class=WithRule, budgets=budgets, memory=limits) as engine:
        work = Load(engine, exam, random.Random(1))
        work.run(200)
        at_200 = at_rest(engine)
        work.run(n_requests - 200)
        at_last = at_rest(engine)
        stats = engine.stats()
    tiers = stats.tiers.values()
    return {
        "compared": exam.check(),
        "hit_rate": work.n_cached / work.n_prompt,
        "rss_mib": [round(n_bytes / MIB, 1) for n_bytes in (at_200, at_last)],
        "growth": at_last / at_200 - 1,
        "cancelled": work.n_cancelled / n_requests,
        "faults": {**work.failed, "step": module.n_failed},
        "wrongly_failed": stats.counters["failed"] - work.failed.total(),
        "cache_errors": {
            "saves": stats.counters["failed_saves"],
            "told": complaints.n,
            "writes": stats.writes.failed,
            "tiers": sum(tier.errors + tier.quarantined for tier in tiers),
        },
        # Evicted between the plan and the reading: a miss, which the plan is made again without.
        "evicted_meanwhile": stats.failed_restores["missing"],
        "rebuilt": stats.counters["rebuilt_batches"],
    }


def in_a_process(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.test_gates", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def hold(tmp_path: Path, architecture: str, n_requests: int) -> None:
    found = in_a_process(tmp_path, "load", architecture, str(n_requests))
    assert found["faults"] == dict.fromkeys(FAULTS, n_requests // 40)  # each, so a tenth in all
    assert found["cancelled"] >= 0.2
    assert set(found["cache_errors"].values()) == {0}
    assert found["wrongly_failed"] == 0
    assert found["rebuilt"] == found["faults"]["step"]
    assert found["hit_rate"] > 0.95
    assert found["growth"] < 0.05
    assert found["compared"] > 20


def test_mixed_requests(tmp_path):
    """The gates of the long run, over fewer requests."""
    hold(tmp_path, "gemma3_text", 320)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next"])
def test_a_thousand_mixed_requests(tmp_path, architecture):
    """Zero cache errors, RSS within 5 % from the 200th to the last request."""
    hold(tmp_path, architecture, 1000)


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
    """Less than a tenth over a fresh one."""
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

"""The engine without HTTP, behind the same interface as a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.requests.client import BenchRequest, TimedReply
from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.engine.engine import Engine
from keepwarm.engine.stats import Stats
from keepwarm.errors import EngineFailed
from keepwarm.models.load import Model, load
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Delta, Done, Request, Sampling


class BareEngine:
    """One engine with its own store in `store`; a restart keeps the model loaded."""

    def __init__(self, model: Path, store: Path) -> None:
        self._settings = config.load(store=store, remote="")  # a cold prompt is one that nobody has
        self._model: Model = load(str(model), self._settings)
        self._open()

    def _open(self) -> None:
        self._store = Store(settings=self._settings)
        self._engine = Engine(self._model, self._store, settings=self._settings)

    def ask(self, ask: BenchRequest) -> TimedReply:
        texts: list[str] = []
        times: list[float] = []
        start = time.perf_counter()
        answer = self._engine.submit(_request(ask))
        for event in answer:
            if isinstance(event, Done):
                return _reply(event, texts, times, time.perf_counter() - start)
            if isinstance(event, Delta) and (text := event.reasoning + event.text):
                texts.append(text)
                times.append(time.perf_counter() - start)
                if not ask.on_text(times[-1]):
                    answer.cancel()
                    return _partial_reply(texts, times)
        raise EngineFailed("The response stopped unexpectedly.")

    def stats(self) -> Stats:
        return self._engine.stats()

    def flush(self) -> None:
        self._store.flush()

    def restart(self) -> None:
        """Drop everything in memory except the weights."""
        self.close()
        self._open()

    def close(self) -> None:
        self._engine.close()
        self._store.close()


def _request(ask: BenchRequest) -> Request:
    bias = dict.fromkeys(ask.forbidden, -100.0)
    sampling = Sampling(max_tokens=ask.max_tokens, temperature=0, logit_bias=bias)
    policy = Policy(ask.policy or Policy.READ_WRITE)
    return Request(messages=ask.messages, sampling=sampling, policy=policy)


def _reply(done: Done, texts: Sequence[str], times: Sequence[float], total_s: float) -> TimedReply:
    usage, receipt = done.usage, done.receipt
    return TimedReply(
        "".join(texts),
        tuple(times),
        total_s,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        receipt.reused,
    )


def _partial_reply(texts: Sequence[str], times: Sequence[float]) -> TimedReply:
    return TimedReply("".join(texts), tuple(times), times[-1], 0, 0, len(times), {})


class DecodeTimes(NamedTuple):
    """Samples of decoding: seconds per token, and CPU seconds per token."""

    token_s: list[float]
    cpu_s: list[float]


def decode_alone(model: Path, store: Path, ask: BenchRequest, samples: int) -> DecodeTimes:
    """Generate the same answer repeatedly from a warm prompt; runs in a child process."""
    engine = BareEngine(model, store)
    try:
        engine.ask(ask)
        found = [_timed(engine, ask) for _ in range(samples)]
    finally:
        engine.close()
    return DecodeTimes([token_s for token_s, _ in found], [cpu_s for _, cpu_s in found])


def _timed(engine: BareEngine, ask: BenchRequest) -> tuple[float, float]:
    before = time.process_time()
    reply = engine.ask(ask)
    return reply.token_s, (time.process_time() - before) / reply.completion_tokens

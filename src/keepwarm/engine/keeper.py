"""Keeping what was computed. A save that fails is counted and costs nobody an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from keepwarm import kv
from keepwarm.cache.restore.manager import Capture
from keepwarm.engine.batch import Batch
from keepwarm.engine.insight.counters import Counters
from keepwarm.engine.jobs import Job, Reading, Sequence
from keepwarm.prefix.blocks import BLOCK_TOKENS

LOG = logging.getLogger(__name__)

OnKept: TypeAlias = Callable[[Sequence], None]


class Keeper:
    """Captures blocks while a prompt is read, while an answer grows, and at the end of both."""

    def __init__(self, counters: Counters, on_kept: OnKept) -> None:
        """`on_kept` is told of every finished sequence, after its blocks are findable."""
        self._counters = counters
        self._on_kept = on_kept

    def slice_done(self, reading: Reading, checkpoint: bool) -> None:
        """Keep the blocks that a slice completed; a checkpoint keeps the very place."""
        prefill = reading.prefill
        self._capture(reading.capture, prefill.caches, prefill.n_done, checkpoint)
        if checkpoint:
            reading.states = None
        elif reading.lane.manager.needs.state and prefill.n_done % BLOCK_TOKENS == 0:
            with self._saving():
                reading.states = _states(prefill.caches, reading.lane.fresh())

    def place(self, reading: Reading) -> None:
        """Make findable all that a reading has, its open block too."""
        prefill = reading.prefill
        if not reading.lane.exact_places:  # those others keep their places as they pass them
            self._capture(reading.capture, prefill.caches, prefill.n_done, True, temporary=True)

    def interrupted(self, reading: Reading) -> None:
        """Keep what was read of a prompt that nobody waits for any more."""
        self._capture(reading.capture, reading.prefill.caches, reading.prefill.n_done, True)

    def failed(self, reading: Reading) -> None:
        """Keep what the last whole block left: a slice that failed may have changed the rest."""
        if reading.states is not None:
            n_whole = reading.prefill.n_done // BLOCK_TOKENS * BLOCK_TOKENS
            self._capture(reading.capture, reading.states, n_whole, checkpoint=True)

    def answer_grows(self, batch: Batch[Sequence], row: Sequence) -> None:
        """Now and then keep the blocks of a long answer: a crash must not cost all of it."""
        window = row.job.home.manager.needs.window
        interval = min(window, BLOCK_TOKENS) // 2 if window else BLOCK_TOKENS
        if row.n_tokens and len(row.tokens) % interval == 0:
            with self._saving():
                row.capture.capture(batch.peek(row), len(row.tokens))

    def answered(self, row: Sequence, caches: kv.Caches) -> None:
        """Keep a whole sequence, in blocks and as it is, and tell who must know."""
        self._capture(row.capture, caches, len(row.tokens), checkpoint=True)
        if row.job.request.policy.writes:
            self._keep_live(row.job, row.tokens, caches)
        with self._saving():
            self._on_kept(row)

    def warmed(self, reading: Reading) -> None:
        """Keep a prompt that was read for its own sake."""
        self.interrupted(reading)
        if reading.job.request.policy.writes:
            self._keep_live(reading.job, list(reading.tokens), reading.prefill.caches)

    def _keep_live(self, job: Job, tokens: list[int], caches: kv.Caches) -> None:
        namespace, owner = job.home.manager.namespace, job.request.agent or ""
        with self._saving():
            job.home.live.put(namespace, tokens, caches, owner)

    def _capture(
        self,
        capture: Capture,
        caches: kv.Caches,
        n_tokens: int,
        checkpoint: bool,
        temporary: bool = False,
    ) -> None:
        with self._saving():
            capture.capture(caches, n_tokens, checkpoint, temporary)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._counters.failed_saves += 1
            LOG.exception("what was computed could not be kept")


def _states(caches: kv.Caches, empty: kv.Caches) -> kv.Caches:
    """The states as they are now, in arrays that nobody writes to; of other layers nothing."""
    return [_state(cache, other) for cache, other in zip(caches, empty, strict=True)]


def _state(cache: Any, empty: Any) -> Any:
    kind = kv.kind_of(cache)
    if kind is kv.Kind.COMPOSITE:
        return type(cache)(*_states(cache.caches, empty.caches))
    return kv.copy_caches([cache])[0] if kind is kv.Kind.STATE else empty

"""Keeping what was computed, in blocks and as live caches.

A save that fails is counted and logged; the answer goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from keepwarm import kv
from keepwarm.cache.restore.restorer import Capture
from keepwarm.engine.batch import Batch
from keepwarm.engine.jobs import Job, PrefillTask, RunningSequence
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.telemetry.ledger import Ledger

LOG = logging.getLogger(__name__)

OnKept: TypeAlias = Callable[[RunningSequence], None]


class Keeper:
    """Captures blocks during prefill and decode, and at the end of both."""

    def __init__(self, ledger: Ledger, on_kept: OnKept) -> None:
        """`on_kept` is called with every finished sequence, after its blocks can be found."""
        self._ledger = ledger
        self._on_kept = on_kept

    def keep_restored(self, task: PrefillTask) -> None:
        """Keep the place where a prompt was restored from memory."""
        receipt = task.job.receipt
        if receipt is not None and "memory" in receipt.reused:
            with self._saving():
                task.current_capture.keep_restored(task.prefill.caches, task.prefill.n_done)

    def keep_slice(self, task: PrefillTask, checkpoint: bool) -> None:
        """Keep the blocks that a slice completed, and a checkpoint if asked."""
        prefill = task.prefill
        self._capture(task.current_capture, prefill.caches, prefill.n_done, checkpoint)
        if checkpoint:
            task.states = None
        elif task.lane.restorer.needs.state and prefill.n_done % BLOCK_TOKENS == 0:
            with self._saving():
                task.states = _copy_states(prefill.caches, task.lane.make_caches())

    def publish_partial_block(self, task: PrefillTask) -> None:
        """Let other requests find all that a task has prefilled, its open block included."""
        prefill = task.prefill
        if not task.lane.restorer.needs.checkpoints:  # else checkpoints are kept at its points
            self._capture(
                task.current_capture, prefill.caches, prefill.n_done, True, temporary=True
            )

    def keep_prefix(self, task: PrefillTask) -> None:
        """Keep all that a task has prefilled."""
        self._capture(task.current_capture, task.prefill.caches, task.prefill.n_done, True)

    def keep_whole_blocks(self, task: PrefillTask) -> None:
        """After a failed slice: keep the states at the last block with which a slice ended; the
        rest may be wrong."""
        if task.states is not None:
            n_whole = task.prefill.n_done // BLOCK_TOKENS * BLOCK_TOKENS
            self._capture(task.current_capture, task.states, n_whole, checkpoint=True)

    def keep_running(self, batch: Batch[RunningSequence], row: RunningSequence) -> None:
        """Keep the blocks of a long answer at intervals: a crash must not lose all of it."""
        window = row.job.lane.restorer.needs.window
        interval = max(1, min(window, BLOCK_TOKENS) // 2) if window else BLOCK_TOKENS
        if row.n_tokens and len(row.tokens) % interval == 0:
            with self._saving():
                row.capture.capture(batch.peek(row), len(row.tokens))

    def keep_answer(self, row: RunningSequence, caches: kv.Caches) -> None:
        """Keep a finished sequence, in blocks and as a live cache, and call `on_kept`."""
        self._capture(row.capture, caches, len(row.tokens), checkpoint=True)
        if row.job.request.policy.writes:
            self._keep_live(row.job, row.capture, row.tokens, caches)
        with self._saving():
            self._on_kept(row)

    def keep_prompt(self, task: PrefillTask) -> None:
        """Keep a prompt that is cached without an answer."""
        self.keep_prefix(task)
        if task.job.request.policy.writes:
            self._keep_live(task.job, task.capture, list(task.tokens), task.prefill.caches)

    def _keep_live(self, job: Job, capture: Capture, tokens: list[int], caches: kv.Caches) -> None:
        namespace, owner = job.lane.restorer.namespace, job.request.agent or ""
        with self._saving(), capture.claim.unless_forgotten() as is_wanted:
            if is_wanted:
                job.lane.live.put(namespace, tokens, caches, owner)

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
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self._ledger.count(failed_saves=1)
            LOG.exception("computed state could not be kept")
        finally:
            self._ledger.count(keeping_ms=1000 * (time.perf_counter() - began))


def _copy_states(caches: kv.Caches, empty: kv.Caches) -> kv.Caches:
    """The state layers in arrays of their own; every other layer is the empty one."""
    return [_copy_state(cache, other) for cache, other in zip(caches, empty, strict=True)]


def _copy_state(cache: Any, empty: Any) -> Any:
    kind = kv.kind_of(cache)
    if kind is kv.Kind.COMPOSITE:
        return type(cache)(*_copy_states(cache.caches, empty.caches))
    return kv.copy_caches([cache])[0] if kind is kv.Kind.STATE else empty

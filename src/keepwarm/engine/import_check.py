"""The check of an imported agent: its blocks are computed again and compared.

Call it on a thread of your own: the blocks are computed as requests, beside those of clients.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from keepwarm.agents.agent import Agent
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.engine.answer import collect
from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import Lane
from keepwarm.engine.live import Live
from keepwarm.errors import BadCacheFile, BadInput, InsufficientResources, KeepwarmError
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, chain
from keepwarm.prefix.policy import Policy
from keepwarm.records.header import HasBytes
from keepwarm.records.record import Part, Record
from keepwarm.store.disk.maintenance import Progress as Count
from keepwarm.store.disk.maintenance import no_progress
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import Tier
from keepwarm.text.request import Event, Progress, Request

EXTENT = r"all|[1-9][0-9]{0,5}"  # what `ImportCheck.run` takes
Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
# How far a vector of K, V or a state may be from ours, relative to its length or to the average
# length in its tensor. Other kernels, other slices and one-by-one decoding round differently, and
# rounding adds up over the layers. `test_import_check.py` has what honest blocks differ by: under a
# sixth of this. Vectors of other tokens differ by more than 1. It need not be tight: what passes a
# sample is no more trusted than before, and after a check of all blocks our own take their place.
TOLERANCE = {"F32": 1e-2, "F16": 5e-2, "BF16": 2e-1}


class ImportCheck:
    """Computes blocks of an agent that was just imported; raises BadCacheFile if one differs."""

    def __init__(self, engine: Engine, agent: Agent, tenant: str = "") -> None:
        self._engine = engine
        self._on_disk = engine.store.on_disk
        self._agent = agent
        self._tenant = tenant
        self._ordinary = engine.lane_of(tenant)
        self._imported = engine.lane_of(tenant, agent.id)
        self._tokens = self._on_disk.tokens_of(agent)
        self._refs = list(chain(agent.namespace, self._tokens))
        if self._imported.restorer.namespace != agent.namespace:
            raise BadInput(
                "Only blocks with the default KV options can be checked; import without the check."
            )

    def run(self, extent: str, count: Count = no_progress) -> Agent:
        """Check `all` blocks or a number of them; an agent that fails is deleted.

        `count` is told how many tokens, or blocks of a sample, are done, and of how many.
        """
        try:
            if extent == "all":
                return self.all(count)
            self.sample(int(extent), count)
        except KeepwarmError:
            self._engine.forget(self._agent.id)
            raise
        return self._agent

    def sample(self, n_blocks: int, count: Count) -> None:
        """Compute some blocks, each from those before it as they were imported."""
        picked = random.sample(self._refs, min(n_blocks, len(self._refs)))
        for done, ref in enumerate(sorted(picked, key=lambda ref: ref.number)):
            count(done, len(picked))
            computed = MemoryTier(1 << 62)
            prompt = self._tokens[: ref.number * BLOCK_TOKENS + ref.n_tokens]
            lane = self._lane_before(ref, computed)
            self._engine.warm(self._request(prompt, Policy.READ_WRITE), lane=lane).result()
            self._compare(ref, ref.key, computed)
            computed.close()

    def all(self, count: Count) -> Agent:
        """Compute all blocks; the agent uses these from now on, and no imported one."""
        answer = self._engine.warm(self._request(self._tokens, Policy.DURABLE))
        kept = collect(_counted(answer, count)).receipt
        if not kept.durable:
            raise InsufficientResources(
                "There is no room for the computed blocks; raise disk_bytes or free disk space, "
                "then import the bundle again."
            )
        name = self._ordinary.restorer.namespace
        for theirs, ours in zip(self._refs, chain(name, self._tokens), strict=True):
            self._compare(theirs, ours.key, self._on_disk.disk)
        return self._on_disk.agents.move(self._agent.id, name, self._tokens)

    def _request(self, prompt: Sequence[int], policy: Policy) -> Request:
        return Request(prompt=prompt, policy=policy, tenant=self._tenant)

    def _lane_before(self, ref: BlockRef, computed: MemoryTier) -> Lane:
        """A lane that restores what comes before a block, and keeps what it computes apart."""
        restorer = replace(
            self._imported.restorer,
            max_restored=ref.number * BLOCK_TOKENS,
            writer=MemorySaver(computed),
        )
        return replace(self._imported, restorer=restorer, live=Live(0))

    def _compare(self, ref: BlockRef, key: BlockKey, computed: Tier) -> None:
        known = self._on_disk.disk.have([ref.key]).get(ref.key)
        for part in known.parts if known else ():
            theirs = self._on_disk.disk.read(ref.key, part)
            ours = computed.read(key, part)
            if theirs is None or ours is None:
                continue  # a state that only one of the two has, for example
            for difference, tolerance in differences(theirs, ours):
                if not difference <= tolerance:
                    raise BadCacheFile(
                        f"The bundle was not imported: block {ref.number} of it is not what this "
                        f"model computes (it differs by {difference:.2g} of its size)."
                    )


def _counted(events: Iterable[Event], count: Count) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Progress):
            count(event.done, event.total)
        yield event


def differences(theirs: Record, ours: Record) -> Iterator[tuple[float, float]]:
    """By tensor: how much the records differ, and how much they may."""
    computed = {tensor.name: tensor for tensor in ours.tensors}
    for tensor in theirs.tensors:
        other = computed.get(tensor.name)
        if other is None and theirs.header.part is Part.WINDOW:
            continue  # our rows have left the window of that layer
        if other is None or other.dtype != tensor.dtype:
            yield np.inf, 0.0
        elif tensor.dtype not in TOLERANCE:
            yield (0.0 if other.data == tensor.data else np.inf), 0.0
        else:
            yield _difference(_vectors(tensor), _vectors(other)), TOLERANCE[tensor.dtype]


def _difference(theirs: Vectors, ours: Vectors) -> float:
    """The largest distance of two vectors, relative to their length or the average length."""
    n_rows = min(theirs.shape[-2], ours.shape[-2])  # of a window both end with the block
    theirs, ours = theirs[..., -n_rows:, :], ours[..., -n_rows:, :]
    if theirs.shape != ours.shape or not n_rows:
        return np.inf if theirs.shape != ours.shape else 0.0
    lengths = np.linalg.norm(ours, axis=-1)
    least = max(float(lengths.mean()), float(np.finfo(np.float32).tiny))
    return float((np.linalg.norm(theirs - ours, axis=-1) / np.maximum(lengths, least)).max())


def _vectors(tensor: HasBytes) -> Vectors:
    shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    if tensor.dtype == "BF16":  # the upper half of an F32
        words = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).reshape(shape)
    dtype = np.float16 if tensor.dtype == "F16" else np.float32
    return np.frombuffer(tensor.data, dtype).astype(np.float32).reshape(shape)

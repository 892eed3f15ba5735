"""Which requests may run at the same time, decided by the memory of their keys and values; which
of several engines may compute."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from keepwarm.config import Settings
from keepwarm.device.memory import MemoryConfig
from keepwarm.errors import BadInput, InsufficientResources
from keepwarm.kv.layout import LayerSpec, Layout
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.text.request import KVOptions, Request
from keepwarm.text.sampling_rules import DrawRules
from keepwarm.units import format_bytes

OWN_SHARE = 0.75  # of the memory, for several requests of one API key


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. Without `memory` the budgets are scaled to the machine."""

    memory: MemoryConfig | None = None
    max_queue: int = 256  # requests that wait or run
    kv: KVOptions = field(default_factory=KVOptions)  # of requests that name none
    audit_share: float = 0.0  # share of cached answers recomputed cold and compared

    @classmethod
    def of(cls, settings: Settings) -> Self:
        kv = KVOptions(
            settings.max_kv_size or None,
            settings.kv_bits or None,
            settings.kv_group_size,
            settings.quantized_kv_start,
            settings.at_rest,
        )
        return cls(None, settings.max_queue, kv, settings.audit_share)

    def complete(self, request: Request, rules: DrawRules) -> Request:
        """The request with the engine's KV options and sampling where it names none."""
        is_own = request.exact or request.kv != KVOptions()
        kv = request.kv if is_own else self.kv
        return replace(request, kv=kv, sampling=rules.complete(request.sampling))

    def __post_init__(self) -> None:
        if self.max_queue < 1:
            raise BadInput(f"max_queue is {self.max_queue}; it must be at least 1.")
        if not 0 <= self.audit_share <= 1:
            raise BadInput(f"audit_share is {self.audit_share}; it must be from 0 to 1.")


def kv_bytes(layout: Layout, n_tokens: int) -> int:
    """Bytes that caches of this layout take for `n_tokens`, rounded up to whole blocks."""
    return sum(
        spec.n_bytes(_rows(leaf, n_tokens))
        for leaf in layout.leaves()
        for spec in leaf.tensors.values()
    )


def _rows(leaf: LayerSpec, n_tokens: int) -> int:
    """A window is bounded, but the rows of a slice are added before old ones are removed."""
    whole = -(-n_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    window = leaf.window or leaf.scalars.get("max_size")
    return min(whole, window + BLOCK_TOKENS) if window else whole


@dataclass(eq=False)
class Lease:
    """Memory that one request may use. Releasing it again has no effect."""

    n_bytes: int  # of each of its answers
    common: Hashable | None  # the batch that it joins if it fits there; None: it runs alone
    n_rows: int  # answers to one prompt
    _admission: Admission = field(repr=False)
    caller: str = ""
    is_joining: bool = True  # it has its own caches beside the batch
    _length: int = 0  # of rows whose batch it joins instead, as a power of two; 0: of none

    @property
    def batch(self) -> Hashable | None:
        return (self.common, self.caller, self._length) if self._length else self.common

    def move_apart(self) -> None:
        """To its caller's rows of about its length: the longest of the common batch pads it, or it
        all others.
        """
        if self.common is not None:
            self._length = self.n_bytes.bit_length()

    def end_joining(self) -> None:
        """Its rows are in the batch and its own caches are freed."""
        self.is_joining = False

    def grow(self, n_bytes: int) -> bool:
        """Raise it to `n_bytes` for a longer answer; False if there is not enough memory. It may
        name another batch then.
        """
        return self._admission._grow(self, n_bytes)

    def release(self) -> None:
        self._admission._release(self)


class Admission:
    """Decides by bytes which requests may run at the same time.

    In a batch every row takes as much as the longest, because mlx-lm pads. A request counts twice
    until it has joined: as caches of its own, and as a row of the batch. One that does not fit
    joins a batch of its own key's rows of about its length. Several requests of one key leave a
    part to others.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._leases: list[Lease] = []

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return _total_bytes(self._leases)

    def reserve(
        self, n_bytes: int, batch: Hashable | None = "batch", n_rows: int = 1, caller: str = ""
    ) -> Lease | None:
        """Memory for a request; None while others need it. Raises if it could never fit."""
        lease = Lease(n_bytes, batch, n_rows, self, caller)
        alone = _total_bytes([lease])
        if alone > self.limit_bytes:
            raise InsufficientResources(
                f"This request needs {format_bytes(alone)} for its keys and values, and all "
                f"requests together may take {format_bytes(self.limit_bytes)}; shorten the prompt, "
                "lower max_tokens, or raise the memory budget."
            )
        with self._lock:
            if not self._fits(lease):
                lease.move_apart()
            if not self._fits(lease):
                return None
            self._leases.append(lease)
        return lease

    def _fits(self, lease: Lease) -> bool:
        others = [other for other in self._leases if other is not lease]
        own = [other for other in others if other.caller == lease.caller != ""]
        is_bounded = own and (lease not in self._leases or self._has_others(lease.caller))
        own_limit = OWN_SHARE * self.limit_bytes if is_bounded else self.limit_bytes
        return (
            _total_bytes([*own, lease]) <= own_limit
            and _total_bytes([*others, lease]) <= self.limit_bytes
        )

    def _has_others(self, caller: str) -> bool:
        return any(lease.caller != caller for lease in self._leases)

    def _grow(self, lease: Lease, n_bytes: int) -> bool:
        with self._lock:
            before = lease.n_bytes, lease._length
            lease.n_bytes = max(lease.n_bytes, n_bytes)
            if not self._fits(lease):
                lease.move_apart()
            if not self._fits(lease):
                lease.n_bytes, lease._length = before
            return lease.n_bytes >= n_bytes

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._leases = [other for other in self._leases if other is not lease]


def _total_bytes(leases: Sequence[Lease]) -> int:
    batches: dict[Hashable, list[Lease]] = {}
    for lease in leases:
        batches.setdefault(lease if lease.batch is None else lease.batch, []).append(lease)
    padded = sum(
        sum(lease.n_rows for lease in rows) * max(lease.n_bytes for lease in rows)
        for rows in batches.values()
    )
    return padded + sum(x.n_bytes for x in leases if x.is_joining and x.batch is not None)

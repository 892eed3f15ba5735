"""The index of a sealed store: it holds no token, no namespace and no owner that can be read.

Sealed tokens have no order, so the best child is found by opening all children of a parent: linear
in their number, some 7 µs each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepwarm.errors import BadRecord
from keepwarm.prefix.blocks import BlockKey, Namespace, common_tokens
from keepwarm.store.index.index import TTL_PIN, Index
from keepwarm.store.index.lookup import NEIGHBOURS
from keepwarm.store.record import Header
from keepwarm.store.seal import Seal
from keepwarm.store.tier import Child, StoredBlock


class SealedIndex(Index):
    def __init__(self, path: Path | str, seal: Seal, half_life_s: float) -> None:
        self._seal = seal
        super().__init__(path, half_life_s)

    def children(self, parent: BlockKey, tokens: bytes) -> list[Child]:
        beside = self._beside(parent)
        found = [Child(key, common_tokens(held, tokens)) for key, held in beside.items()]
        shared = sorted((c for c in found if c.n_common), key=lambda c: -c.n_common)
        begun = [c for c in shared[2 * NEIGHBOURS :] if 4 * c.n_common == len(beside[c.key])]
        return shared[: 2 * NEIGHBOURS] + begun

    def shorter_siblings(self, key: BlockKey) -> list[BlockKey]:
        rows = self._rows("SELECT parent FROM blocks WHERE key = ?", (key,))
        beside = self._beside(BlockKey(rows[0][0])) if rows else {}
        own = beside.pop(key, b"")
        return [k for k, held in beside.items() if len(held) < len(own) and own.startswith(held)]

    def walk(self) -> Iterator[StoredBlock]:
        for stored in super().walk():
            name = self._opened(b"namespace", stored.key, stored.namespace)
            yield stored._replace(namespace=Namespace(name))

    def add(self, header: Header, *args: Any, **kwargs: Any) -> None:
        name = self._seal.seal(b"namespace" + header.key, header.namespace)
        super().add(replace(header, namespace=Namespace(name)), *args, **kwargs)

    def pin(self, key: BlockKey, owner: str) -> None:
        super().pin(key, self._owner(owner))

    def unpin(self, key: BlockKey, owner: str) -> None:
        super().unpin(key, self._owner(owner))

    def pin_only(self, owner: str, keys: Iterable[BlockKey]) -> None:
        super().pin_only(self._owner(owner), keys)

    def _kept_tokens(self, header: Header) -> bytes:
        return self._seal.seal(b"tokens" + header.key, header.tokens)

    def _beside(self, parent: BlockKey) -> dict[BlockKey, bytes]:
        """The tokens of every child; those that do not open are left out."""
        rows = self._rows("SELECT key, tokens FROM tokens WHERE parent = ?", (parent,))
        opened = {BlockKey(key): self._opened(b"tokens", key, held) for key, held in rows}
        return {key: tokens for key, tokens in opened.items() if tokens}

    def _opened(self, kind: bytes, key: bytes, data: bytes) -> bytes:
        """Nothing where the row was tampered with: the index is a convenience."""
        try:
            return self._seal.open(kind + key, data)
        except BadRecord:
            return b""

    def _owner(self, owner: str) -> str:
        """Hidden; of a mark only its end is told, which any process must be able to read."""
        if owner.startswith(TTL_PIN):
            return owner
        return self._seal.hidden("owner", owner.encode()).hex()

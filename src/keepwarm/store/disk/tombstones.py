"""What is still to be deleted from tiers that machines share: a tombstone for each deletion.

It is a small file, written before anything is deleted here, so that a tier which cannot be reached
is cleared later. It holds keys of blocks and no tokens. A store that shares nothing has none.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from keepwarm.errors import BadRecord
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.maintenance import (
    Progress,
    file_path,
    no_progress,
    read_file,
    secure_delete,
    subtrees,
    write_file,
)
from keepwarm.store.tier import NamedBlock, as_store_errors

DIRECTORY = "shared"
PLACES = "places"  # the name of the file that lists the tiers
DAMAGE = (ValueError, KeyError, TypeError, BadRecord)


class Tombstone(NamedTuple):
    """Blocks, in any of the namespaces, and the addresses of tiers that still have them."""

    namespaces: tuple[Namespace, ...]
    blocks: tuple[NamedBlock, ...]
    left: tuple[str, ...]

    @classmethod
    def from_json(cls, text: bytes) -> Tombstone:
        fields = json.loads(text)
        names = (Namespace(bytes.fromhex(name)) for name in fields["namespaces"])
        blocks = (
            NamedBlock(BlockKey(bytes.fromhex(key)), BlockKey(bytes.fromhex(parent)), int(n))
            for key, parent, n in fields["blocks"]
        )
        return cls(tuple(names), tuple(blocks), tuple(map(str, fields["left"])))

    def to_json(self) -> bytes:
        fields = {
            "namespaces": [name.hex() for name in self.namespaces],
            "blocks": [(key.hex(), parent.hex(), n) for key, parent, n in self.blocks],
            "left": self.left,
        }
        return json.dumps(fields).encode()


class Tombstones:
    """Those of one store directory."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def share_with(self, addresses: Sequence[str]) -> None:
        """Note where the blocks of this store go from now on."""
        if list(addresses) != self.places():
            write_file(self._disk, self._path(PLACES), json.dumps(list(addresses)).encode())

    def places(self) -> list[str]:
        """Where its blocks go; empty if nowhere, or if that cannot be read now."""
        try:
            return self.read_places()
        except OSError:
            return []

    def read_places(self) -> list[str]:
        """The same, but raises OSError if it cannot be read."""
        try:
            return list(map(str, json.loads(read_file(self._disk, self._path(PLACES)))))
        except (FileNotFoundError, *DAMAGE):
            return []

    def add(self, namespaces: Iterable[Namespace], blocks: Iterable[NamedBlock]) -> None:
        named, places = tuple(dict.fromkeys(blocks)), self.read_places()
        if named and places:
            tombstone = Tombstone(tuple(dict.fromkeys(namespaces)), named, tuple(places))
            self._save(self._path(uuid.uuid4().hex), tombstone)

    def all(self) -> dict[Path, Tombstone]:
        found = {}
        for path in (self._disk.root / DIRECTORY).glob("*.json"):
            if path != self._path(PLACES):
                try:
                    found[path] = Tombstone.from_json(read_file(self._disk, path))
                except (OSError, *DAMAGE):
                    continue  # finished by another process, or damaged
        return found

    def finish(self, path: Path, tombstone: Tombstone, left: Collection[str]) -> None:
        """Keep a tombstone for those tiers that still have its blocks."""
        if not left:
            with as_store_errors(self._disk, "delete a tombstone"):
                self._disk.files.remove(path)
        elif tuple(left) != tombstone.left:
            self._save(path, tombstone._replace(left=tuple(left)))

    def _save(self, path: Path, tombstone: Tombstone) -> None:
        write_file(self._disk, path, tombstone.to_json())

    def _path(self, name: str) -> Path:
        return file_path(self._disk, DIRECTORY, name)


def delete_everywhere(
    disk: DiskTier,
    namespaces: Iterable[Namespace],
    keys: Sequence[BlockKey],
    keep: Collection[BlockKey] = (),
    *,
    gone: Iterable[NamedBlock] = (),
    progress: Progress = no_progress,
) -> int:
    """Delete these blocks of one conversation, their descendants and shorter copies; how many.

    Blocks in `keep` stay; the caller includes their ancestors. From shared tiers they are deleted
    later, and so is what is `gone` from this disk.
    """
    deleting = list(subtrees(disk.index.lookups, keys, keep))
    with as_store_errors(disk, "note what is deleted"):
        named = disk.index.lookups.named(deleting)
        Tombstones(disk).add(namespaces, [*named, *gone])
    return secure_delete(disk, deleting, progress)

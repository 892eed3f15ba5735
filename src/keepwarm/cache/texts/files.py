"""Small texts that go with an agent, as the responses that clients refer to by id.

Each is a file, `responses/<agent>~<name>.json`, sealed and under hidden names in a sealed store.
They are kept for a time and up to a size, the oldest deleted first.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from keepwarm.errors import BadRecord
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.upkeep import read_file, write_file
from keepwarm.store.tier import as_store_errors

SEPARATOR = "~"  # is in no agent's id
NAME = re.compile(r"[A-Za-z0-9._@-]*~[0-9a-f]{40,64}\.json")


class AgentTexts:
    """The texts of one kind. Thread-safe: every text is a file of its own."""

    def __init__(
        self,
        disk: DiskTier,
        directory: str,
        max_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._name = directory
        self._max_bytes = max_bytes
        self._clock = clock

    def put(self, agent_id: str, name: str, data: bytes, ttl_s: float) -> None:
        """Publish a text, of an agent or of none (""), and delete what is too old or too much."""
        write_file(self._disk, self.path_of(agent_id, name), data)
        self._expire(ttl_s)

    def path_of(self, agent_id: str, name: str) -> Path:
        return self._directory / f"{self._stem(agent_id)}{SEPARATOR}{self._hash(name)}.json"

    def get(self, name: str, ttl_s: float) -> bytes | None:
        """A text by its name, whichever agent it belongs to."""
        for path in self._directory.glob(f"*{SEPARATOR}{self._hash(name)}.json"):
            with suppress(OSError, BadRecord):
                if self._clock() - path.stat().st_mtime <= ttl_s:
                    return read_file(self._disk, path)
        return None

    def remove(self, name: str) -> None:
        self._remove(self._directory.glob(f"*{SEPARATOR}{self._hash(name)}.json"))

    def remove_agent(self, agent_id: str) -> None:
        """Delete all texts of an agent."""
        self._remove(self._directory.glob(f"{self._stem(agent_id)}{SEPARATOR}*.json"))

    def remove_all(self) -> None:
        """Delete all texts, also those of no agent."""
        self._remove(path for path in self._directory.glob("*.json") if NAME.fullmatch(path.name))

    def _expire(self, ttl_s: float) -> None:
        """Delete the oldest texts, until the rest is neither too old nor too much."""
        ours = [entry for entry in os.scandir(self._directory) if NAME.fullmatch(entry.name)]
        entries = [(entry, entry.stat(follow_symlinks=False)) for entry in ours]
        n_bytes, now = sum(about.st_size for _, about in entries), self._clock()
        for entry, about in sorted(entries, key=lambda pair: pair[1].st_mtime):
            if n_bytes <= self._max_bytes and now - about.st_mtime <= ttl_s:
                return
            self._remove([Path(entry.path)])
            n_bytes -= about.st_size

    def _remove(self, paths: Iterable[Path]) -> None:
        with as_store_errors(self._disk, f"delete {self._name}"):
            for path in list(paths):
                self._disk.files.remove(path)

    @property
    def _directory(self) -> Path:
        return self._disk.root / self._name

    def _stem(self, agent_id: str) -> str:
        seal = self._disk.seal
        return agent_id if seal is None else seal.hidden(self._name, agent_id.encode()).hex()

    def _hash(self, name: str) -> str:
        """A name may be anything that a client sends."""
        plain = name.encode("utf-8", "surrogatepass")
        seal = self._disk.seal
        if seal is not None:
            return seal.hidden(f"{self._name}.name", plain).hex()
        return blake2b(plain, digest_size=20).hexdigest()

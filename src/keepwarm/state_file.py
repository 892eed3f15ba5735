"""What Keepwarm remembers between starts, in a few small JSON files.

Several processes may share a file, and several sections lie in one: each is read and changed on its
own, under one lock for all files of a directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from keepwarm.files import SharedLock, write_atomically

MACHINE = "machine.json"  # in the home directory: what was measured on this machine
STORE = "state.json"  # in a store: what its processes have counted
DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # what parsing raises

T = TypeVar("T")


class StateFile(Generic[T]):
    """One section of a file. What is missing or damaged is what `parse` makes of nothing."""

    def __init__(
        self,
        path: Path,
        section: str,
        parse: Callable[[Mapping[str, Any]], T],
        to_json: Callable[[T], Any] = lambda value: value,
        *,
        lock: Path | None = None,
    ) -> None:
        self.path = path
        self._section = section
        self._parse = parse
        self._to_json = to_json
        self.lock = SharedLock(lock or path.with_name("state.lock"))

    def read(self) -> T:
        try:
            return self.read_to_change()
        except OSError:
            return self._parse({})

    def read_to_change(self) -> T:
        """The same, but raises OSError: what cannot be read now must not be written over."""
        try:
            return self.read_strictly()
        except DAMAGE:
            return self._parse({})

    def read_strictly(self) -> T:
        """Raises OSError, or one of DAMAGE, if the file is there and cannot be read."""
        try:
            whole = json.loads(self.path.read_text())
        except FileNotFoundError:
            whole = {}
        return self._parse(whole.get(self._section, {}))

    def change(self, change: Callable[[T], T], *, wait_s: float | None = None) -> T:
        """Replace the value by what `change` makes of it, atomic among processes; returns it.

        Raises OSError if the file cannot be read or written, or others hold the lock for too long.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.lock.hold(wait_s):
            value = change(self.read_to_change())
            self.write(value)
        return value

    def write(self, value: T) -> None:
        """Replace the value; for who holds the lock."""
        try:
            whole = dict(json.loads(self.path.read_text()))
        except (FileNotFoundError, *DAMAGE):
            whole = {}
        whole[self._section] = self._to_json(value)
        write_atomically(self.path, json.dumps(whole, separators=(",", ":")))


def store_file(
    root: Path,
    section: str,
    parse: Callable[[Mapping[str, Any]], T],
    to_json: Callable[[T], Any] = lambda value: value,
) -> StateFile[T]:
    """A section of a store's file."""
    return StateFile(root / STORE, section, parse, to_json, lock=root / "tmp" / "state")

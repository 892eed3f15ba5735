"""Locks that tell in which order a thread takes them."""

import linecache
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import keepwarm

ATTRIBUTE = re.compile(r"self\.(\w+)")


class LockOrder:
    """Which locks were taken while which others were held, by their names."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self._own = threading.local()

    @property
    def _held(self) -> list["OrderedLock"]:
        if not hasattr(self._own, "held"):
            self._own.held = []
        return self._own.held

    def took(self, lock: "OrderedLock") -> None:
        self.seen |= {(held.name, lock.name) for held in self._held if held is not lock}
        self._held.append(lock)

    def left(self, lock: "OrderedLock") -> None:
        """Nothing where another thread took it."""
        if lock in self._held:
            self._held.remove(lock)

    def watch(self) -> None:
        """Have every lock that Keepwarm makes from now on noted here; for a process of its own."""
        for path in Path(keepwarm.__file__).parent.rglob("*.py"):
            linecache.getlines(str(path))  # NOTE: or `_name` would open it on a thread under test
        for kind in ("Lock", "RLock"):
            setattr(threading, kind, self._maker(getattr(threading, kind)))

    def _maker(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            name = _name(sys._getframe(1))
            return OrderedLock(make(), name, self) if name else make()

        return made


class OrderedLock:
    """A lock or an RLock, also inside a Condition."""

    def __init__(self, lock: Any, name: str, order: LockOrder) -> None:
        self.name = name
        self._lock, self._order = lock, order

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._order.took(self)
        return taken

    def release(self) -> None:
        self._order.left(self)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        """What a Condition asks of an RLock; while it waits the thread takes no other lock."""
        return getattr(self._lock, name)


def _name(frame: FrameType | None) -> str:
    """`Writer._changed` of a lock that is made for an attribute of ours, else empty."""
    if frame is not None and frame.f_globals.get("__name__") == "threading":
        is_condition = isinstance(frame.f_locals.get("self"), threading.Condition)
        frame = frame.f_back if is_condition else None  # an Event's is never held by ours
    if frame is None or not frame.f_globals.get("__name__", "").startswith("keepwarm."):
        return ""
    found = ATTRIBUTE.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
    owner = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else "?"
    return f"{owner}.{found[1]}" if found else f"{owner}.?"

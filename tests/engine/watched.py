"""Plays the golden scenario and tells what the engine's thread does with files, sockets, SQL and
logs, and in which order all threads take locks.

A program of its own: an audit hook stays for the life of its process.
"""

import json
import logging
import sqlite3
import sys
import threading
from collections import Counter
from pathlib import Path

from tests.golden import scenario
from tests.kit.locks import LockOrder

ENGINE = "keepwarm-engine"
FORBIDDEN = ("open", "os.", "socket.", "shutil.", "tempfile.", "subprocess.")
LAYER = "keepwarm.store"  # its callers are named, not itself


class Watch:
    """Counts what the engine's thread does, by the function of Keepwarm that asked for it."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.elsewhere: set[str] = set()

    def note(self, kind: str) -> None:
        if threading.current_thread().name == ENGINE:
            self.seen[f"{kind} in {_caller()}"] += 1
        else:
            self.elsewhere.add(kind)

    def hook(self, event: str, _: tuple[object, ...]) -> None:
        if event.startswith(FORBIDDEN):
            self.note("socket" if event.startswith("socket") else "file")


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("keepwarm.") and not module.startswith(LAYER):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "nobody of ours"


def guard(watch: Watch) -> None:
    """Have every connection tell of its statements."""

    class Guarded(sqlite3.Connection):
        def execute(self, *query):
            watch.note("SQL")
            return super().execute(*query)

        def executemany(self, *query):
            watch.note("SQL")
            return super().executemany(*query)

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **options: connect(*args, factory=Guarded, **options)


class LogWatch(logging.Handler):
    """What a program would write to its log."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def emit(self, _: logging.LogRecord) -> None:
        self._watch.note("log")


if __name__ == "__main__":
    watch, order = Watch(), LockOrder()
    guard(watch)
    order.watch()
    sys.addaudithook(watch.hook)
    logging.basicConfig(handlers=[LogWatch(watch)], level=logging.INFO)
    logging.getLogger("keepwarm").info("the golden scenario begins")
    scenario.play(sys.argv[1], Path(sys.argv[2]))
    elsewhere = sorted(watch.elsewhere)
    found = {"engine": watch.seen, "callers": elsewhere, "locks": sorted(order.seen)}
    sys.stdout.write(json.dumps(found))

"""What a shared tier asks of the place that holds its records.

Every call ends within its time. A place that cannot do what it is asked raises CallError, for
whatever reason: it is gone, slow, full of other things, or refuses the password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from keepwarm.concurrency import CallError
from keepwarm.errors import BadInput

T = TypeVar("T")
Take: TypeAlias = Callable[[int], memoryview]
"""Gives the memory for a number of bytes; raises CallError or BadRecord if that is too many."""

BESIDE = 64  # names that are listed beside those that are wanted
NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}(/(?!\.)[A-Za-z0-9_.-]{1,128}){0,7}")


class Listed(NamedTuple):
    """A name; its bytes and the time of its last use by the store's clock, if listing tells."""

    name: str
    n_bytes: int = 0
    used: float = 0.0


class FolderRange(NamedTuple):
    """The names of a folder that begin with a stem, and some others."""

    folder: str
    stem: str


class Backend(Protocol):
    """A place for blobs. Names are words of letters, digits, `_`, `.` and `-`, joined by `/`."""

    in_batches: bool
    """Whether many names are asked for in one round trip."""

    is_distant: bool
    """Whether a round trip may be long, so that no fixed time is enough for a question."""

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int | None]:
        """The bytes of each blob; None where there is none."""

    def look(self, ranges: Sequence[FolderRange], timeout_s: float) -> list[list[Listed]]:
        """All names that begin with the stems, and some others of these folders, first ones first;
        with their bytes, and at the same time.
        """

    def fetch(
        self,
        name: str,
        take: Take,
        use: Callable[[memoryview], T],
        timeout_s: float,
        n_bytes: int | None = None,
    ) -> T | None:
        """What `use` makes of a blob, or of its first `n_bytes`; None if there is none. The bytes
        are in memory from `take`, or in a client's own if `take` agrees to their number. `use` runs
        on the thread that has read them: another core would have to get them first.
        """

    def read(
        self, name: str, take: Take, timeout_s: float, n_bytes: int | None = None
    ) -> memoryview | None:
        """The bytes themselves."""

        def same(memory: memoryview) -> memoryview:
            return memory

        return self.fetch(name, take, same, timeout_s, n_bytes)

    def put(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        timeout_s: float,
        replace: bool = False,
    ) -> bool:
        """Store a blob, unless there is one and it is not to be replaced; whether it is stored.

        No room is a refusal and no error. Readers see a whole blob or none.
        """

    def touch(self, names: Sequence[str], timeout_s: float) -> None:
        """Note a use of blobs, so that others are evicted before; the last is evicted last."""

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Delete blobs; a missing one is no error."""

    def list_names(self, folder: str, timeout_s: float) -> list[Listed]:
        """All names that begin with the folder and `/`, or folders that they lie in; some may be
        stale.
        """

    def list_page(self, folder: str, timeout_s: float, after: str = "") -> list[Listed]:
        """Some of these names, the first `after` one that is given; none after the last."""
        return [] if after else self.list_names(folder, timeout_s)

    def close(self) -> None: ...


def new_memory(n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))


def at_most(n_most: int, take: Take = new_memory) -> Take:
    """The same memory, but no more: a place may send more than it was asked for."""

    def take_some(n_bytes: int) -> memoryview:
        if n_bytes > n_most:
            raise CallError(f"a blob of {n_bytes} bytes is too large")
        return take(n_bytes)

    return take_some


def check_name(name: str) -> str:
    """The name; raises if a place could take it for something else."""
    if not NAME.fullmatch(name):
        raise BadInput(f"{name!r} is not the name of a blob; use letters, digits, _ . - and /.")
    return name

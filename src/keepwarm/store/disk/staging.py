"""Several records that become findable together, or not at all."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

from keepwarm.errors import StoreFailed
from keepwarm.store.disk.disk import DiskTier, UnpublishedRecord
from keepwarm.store.record import Record


class StagedRecords:
    """Records that wait for others; use `with`, which withdraws those that were not published.

    They are encrypted, counted and limited like all records of the store, and a start deletes what
    a killed process left of them.
    """

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._written: deque[UnpublishedRecord] = deque()

    def add(self, record: Record) -> bool:
        """Write a record; False if there is no room for it."""
        written = self._disk.write(record)
        if written is not None:
            self._written.append(written)
        return written is not None

    def publish(self) -> None:
        """Let all be found; if one fails, those before it are deleted again."""
        published = []
        try:
            while self._written:
                written = self._written.popleft()
                if self._disk.publish(written):
                    published.append(written.header.key)
        except BaseException:
            with suppress(StoreFailed):
                self._disk.delete_all(published)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._written:
            self._disk.withdraw(self._written.popleft())

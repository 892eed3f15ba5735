"""Restores that failed, by reason. None of them fails a request: its prompt is computed."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Fault: TypeAlias = Literal["missing", "damaged", "unreadable", "newer", "layout", "error"]
"""
missing      a record was gone when it was to be read
damaged      its digests did not match; it is quarantined
unreadable   the file system gave an error
newer        a newer Keepwarm has written it
layout       it is whole, but does not fit the model or the prompt; it is quarantined
error        anything else; the log has it
"""

FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)


class RestoreFailures:
    """The engine's thread counts, any may read."""

    def __init__(self) -> None:
        self.by_reason: dict[str, int] = dict.fromkeys(FAULTS, 0)

    def add(self, fault: Fault) -> None:
        self.by_reason[fault] += 1

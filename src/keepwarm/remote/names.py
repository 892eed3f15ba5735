"""Names in a shared place: `<class>/<namespace>/<parent>/<key>.<part>`.

So the records that follow a block lie in one folder. The class is what numbers depend on besides
the namespace, as backend and version of MLX: machines of different classes share nothing, unless
they are told to. All classes are listed in the folder `classes`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from keepwarm.prefix.blocks import KEY_BYTES, BlockKey, Namespace
from keepwarm.records.record import Header, Part
from keepwarm.remote.backend import Backend

CLASSES = "classes"
CLASS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # other files may lie beside them
MAC = ".mac"  # ends the name of a record's MAC


class RecordPlace(NamedTuple):
    """Where a record lies among others."""

    namespace: Namespace
    parent: BlockKey
    key: BlockKey
    part: Part
    numerics: str = ""  # its class; "" is that of this machine

    @classmethod
    def of(cls, header: Header) -> RecordPlace:
        return cls(header.namespace, header.parent, header.key, header.part)


class RemoteNames:
    def __init__(self, numerics: str) -> None:
        self._numerics = numerics

    def of(self, place: RecordPlace) -> str:
        folder = self.folder(place.namespace, place.parent, place.numerics)
        return f"{folder}/{place.key.hex()}.{place.part.value}"

    def folder(self, namespace: Namespace, parent: BlockKey, numerics: str = "") -> str:
        return f"{numerics or self._numerics}/{namespace.hex()}/{parent.hex()}"


def list_classes(backend: Backend, timeout_s: float) -> list[str]:
    """All that machines have put records for."""
    listed = backend.list_names(CLASSES, timeout_s, None)
    names = (one.name.removeprefix(f"{CLASSES}/") for one in listed)
    return sorted(name for name in names if CLASS.fullmatch(name))


def parse_last(name: str) -> tuple[BlockKey, Part] | None:
    """Key and part of a name; None if it is not one of ours."""
    stem, _, part = name.rpartition("/")[2].partition(".")
    try:
        key = BlockKey(bytes.fromhex(stem))
        return (key, Part(part)) if len(key) == KEY_BYTES and stem == stem.lower() else None
    except ValueError:
        return None

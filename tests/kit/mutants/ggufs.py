"""Mutants of GGUF files."""

from __future__ import annotations

import struct
from functools import lru_cache
from random import Random
from typing import NamedTuple

from tests.kit.mutants.changes import NUMBERS, TEXTS, little, spoil

WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf(chance: Random, data: bytes) -> bytes:
    if chance.random() < 0.1:
        return spoil(chance, data)
    header = _header(data)
    pieces = list(header.pieces)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        among = header.single if chance.random() < 0.8 else range(len(pieces) - 1)
        at = min(chance.choice(among), len(pieces) - 2)
        match chance.randrange(12):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, chance.choice(pieces[:-1]))
            case 2 | 3:
                pieces[at] = chance.choice(header.pieces[:-1])
            case 4 | 5:
                text = chance.choice(TEXTS).encode("utf-8", "surrogatepass")
                pieces[at] = little(len(text), 8) + text
            case 6:
                pieces[at] = little(chance.choice(NUMBERS), 8) + pieces[at][8:]
            case _:
                pieces[at] = _other_number(chance, pieces[at])
    if chance.random() < 0.1:
        pieces[-1] = spoil(chance, pieces[-1])
    return b"".join(pieces)


def _other_number(chance: Random, piece: bytes) -> bytes:
    """Of the same width; of a string some bytes, but not its length."""
    if len(piece) > 8:
        return piece[:8] + bytes(byte ^ 1 << chance.randrange(8) for byte in piece[8:])
    old = int.from_bytes(piece, "little")
    new = [chance.choice(NUMBERS), chance.randrange(13), old + 1, old - 1, 2 * old, old // 2]
    return little(chance.choice(new), len(piece))


class GGUFPieces(NamedTuple):
    pieces: tuple[bytes, ...]  # every number and string of the header, and last all the rest
    single: tuple[int, ...]  # which of them are not items of an array


@lru_cache(maxsize=8)
def _header(data: bytes) -> GGUFPieces:
    cursor = _Cursor(data)
    cursor.take(4), cursor.take(4)
    n_tensors, n_values = cursor.number(8), cursor.number(8)
    for _ in range(n_values):
        cursor.string()
        cursor.value()
    for _ in range(n_tensors):
        cursor.string()
        for _ in range(cursor.number(4)):
            cursor.take(8)
        cursor.take(4), cursor.take(8)
    single = tuple(i for i in range(len(cursor.pieces)) if i not in cursor.items)
    return GGUFPieces((*cursor.pieces, data[cursor.at :]), single)


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.pieces: list[bytes] = []
        self.items: set[int] = set()

    def take(self, n: int) -> bytes:
        self.pieces.append(self.data[self.at : self.at + n])
        self.at += n
        return self.pieces[-1]

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def string(self) -> None:
        (n,) = struct.unpack_from("<Q", self.data, self.at)
        self.take(8 + n)

    def value(self) -> None:
        kind = self.number(4)
        if kind != 9:
            self._one(kind)
            return
        kind, n = self.number(4), self.number(8)
        for _ in range(n):
            self.items.add(len(self.pieces))
            self._one(kind)

    def _one(self, kind: int) -> None:
        self.string() if kind == 8 else self.take(WIDTHS[kind])

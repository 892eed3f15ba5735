"""Mutants of bundles: of the archive, its manifest and its records."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from keepwarm.prefix.fingerprint import digest
from tests.kit.mutants.changes import NUMBERS, JsonMutant, parsed, spoil
from tests.kit.mutants.safetensors import record

BLOCK = 512
FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "size": (124, 12),
    "sum": (148, 8),
    "kind": (156, 1),
    "link": (157, 100),
    "magic": (257, 8),
    "device": (329, 16),
    "prefix": (345, 155),
}


class TarEntry(NamedTuple):
    header: bytes
    data: bytes

    def with_field(self, name: str, value: bytes) -> TarEntry:
        at, n = FIELDS[name]
        block = self.header[:at] + value[:n].ljust(n, b"\0") + self.header[at + n :]
        return TarEntry(_summed(block), self.data)

    def with_data(self, data: bytes) -> TarEntry:
        return TarEntry(self.header, data).with_field("size", b"%011o" % len(data))

    @property
    def name(self) -> str:
        return self.header[:100].rstrip(b"\0").decode("latin1")


def _summed(block: bytes) -> bytes:
    total = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def _entries(data: bytes) -> list[TarEntry]:
    entries, at = [], 0
    while any(block := data[at : at + BLOCK]):
        n = int(block[124:135], 8)
        entries.append(TarEntry(block, data[at + BLOCK : at + BLOCK + n]))
        at += BLOCK + n + -n % BLOCK
    return entries


def bundle(chance: Random, data: bytes) -> bytes:
    if chance.random() < 0.15:
        return spoil(chance, data)
    entries = _entries(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if not entries:
            break
        at = chance.randrange(len(entries))
        match chance.randrange(8):
            case 0:
                del entries[at]
            case 1:
                entries.insert(chance.randrange(len(entries) + 1), entries[at])
            case 2:
                other = chance.randrange(len(entries))
                entries[at], entries[other] = entries[other], entries[at]
            case 3:
                entries.insert(at, _stranger(chance, entries[at]))
            case 4:
                name = chance.choice(list(FIELDS))
                entries[at] = entries[at].with_field(name, _field(chance))
            case _:
                entries[at] = entries[at].with_data(_content(chance, entries[at]))
    body = b"".join(e.header + e.data + bytes(-len(e.data) % BLOCK) for e in entries) + bytes(1024)
    body += bytes(-len(body) % 10240)
    return body if chance.random() < 0.9 else spoil(chance, body)


def _content(chance: Random, entry: TarEntry) -> bytes:
    if entry.name != "manifest.json":
        return record(chance, entry.data)
    tree = parsed(entry.data)
    if not tree:
        return spoil(chance, entry.data)
    mutant = JsonMutant(chance, tree)
    mutant.tree.pop("digest", None)
    mutant.change()
    if chance.random() < 0.9 and not mutant.words:
        mutant.tree["digest"] = digest(mutant.tree, 32)
    return mutant.text()


def _field(chance: Random) -> bytes:
    number = chance.choice(NUMBERS)
    return chance.choice([
        b"%o" % abs(number), b"%11o" % number, b"\x80" + abs(number).to_bytes(200)[-11:], b"",
        b"-1", chance.randbytes(12), b"manifest.json", b"../x", b"\xff" * 155, b"5", b"x", b"L",
    ])  # fmt: skip


def _stranger(chance: Random, entry: TarEntry) -> TarEntry:
    """An entry of a kind that bundles do not have: long names, extended headers, sparse files."""
    kind = chance.choice([b"L", b"K", b"x", b"g", b"S", b"1", b"2", b"3", b"5", b"6", b"7", b"\0"])
    data = chance.choice([b"", b"1" * 42_000, b"30 path=" + b"a" * 21 + b"\n", b"\xff" * 600])
    made = entry.with_data(data).with_field("kind", kind)
    return made if chance.random() < 0.7 else made.with_field("size", b"%011o" % (800 << 20))

"""The archive of a bundle: a small part of the tar format, read strictly.

`manifest.json` and records, each a plain file under a short name. Links, long names, sparse files,
extended headers and all else that tar knows is refused, so that nothing costs more to read than
its own bytes. Fields that mean nothing here, such as owner and time, are ignored.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from keepwarm.errors import BadRecord

BLOCK_BYTES = 512
FACTOR_BYTES = 10240  # the length of an archive is a multiple of it
MAX_ENTRY_BYTES = 0o77777777777  # 8 GiB; more does not fit into a header
MANIFEST = "manifest.json"
LAYOUT = struct.Struct("100s 8s8s8s 12s12s 8s c 100s 8s 32s32s8s8s 155s 12x")
FILE, MAGIC = b"0", b"ustar\x0000"
NAME = re.compile(rb"(manifest\.json|[0-9a-f]{40}\.[dws]\.safetensors)\0+")
SIZE = re.compile(rb"([0-7]{11})\0")


class ArchiveWriter:
    """Writes entries one after another; `close` ends the archive."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._n_bytes = 0

    def add(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        n_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        self._write([_header(name, n_bytes), *pieces, _padding(n_bytes, BLOCK_BYTES)])

    def close(self) -> None:
        end = bytes(2 * BLOCK_BYTES)
        self._write([end, _padding(self._n_bytes + len(end), FACTOR_BYTES)])

    def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            self._file.write(piece)
            self._n_bytes += memoryview(piece).nbytes


class ArchiveReader:
    """The entries of an archive of so many bytes, in order.

    Each is read to its end before the next is asked for; the file need not be seekable. Raises
    BadRecord for all that `ArchiveWriter` does not write.
    """

    def __init__(self, file: BinaryIO, n_bytes: int) -> None:
        self.offset = 0  # bytes read so far
        self._file = file
        self._n_bytes = n_bytes
        self._names: set[str] = set()

    def __iter__(self) -> Iterator[ArchiveEntry]:
        while any(block := self._read(BLOCK_BYTES)):
            entry = self._entry(block)
            yield entry
            if not entry.is_at_end():
                raise BadRecord(f"{entry.name} is longer than its content")
            if any(self._read(-entry.n_bytes % BLOCK_BYTES)):
                raise BadRecord(f"there is data after {entry.name}")
        self._check_end()

    def readinto(self, data: memoryview) -> int:
        n_read = self._file.readinto(data)  # type: ignore[attr-defined]
        self.offset += n_read
        return int(n_read)

    def _entry(self, block: bytes) -> ArchiveEntry:
        name, *_, size, _, checksum, kind, _, magic = LAYOUT.unpack(block)[:10]
        prefix = LAYOUT.unpack(block)[-1]
        if magic != MAGIC or checksum != _checksum(block):
            raise BadRecord("it is not an archive, or was damaged")
        known, length = NAME.fullmatch(name), SIZE.fullmatch(size)
        if known is None or length is None or kind != FILE or any(prefix):
            raise BadRecord("it holds an entry that is not of a bundle")
        text = known[1].decode()
        if text in self._names:
            raise BadRecord(f"{text} is in it twice")
        self._names.add(text)
        n_bytes = int(length[1], 8)
        if n_bytes > self._n_bytes - self.offset:
            raise BadRecord("it is cut short")
        return ArchiveEntry(self, text, n_bytes)

    def _check_end(self) -> None:
        """One more block of zeros, and as many as fill the last unit; nothing behind them."""
        n_left = BLOCK_BYTES + -(self.offset + BLOCK_BYTES) % FACTOR_BYTES
        if any(self._read(n_left)) or self._file.read(1):
            raise BadRecord("there is data after its end")

    def _read(self, n_bytes: int) -> bytes:
        data = bytearray(n_bytes)
        view = memoryview(data)
        while view:
            n_read = self.readinto(view)
            if not n_read:
                raise BadRecord("it is cut short")
            view = view[n_read:]
        return bytes(data)


class ArchiveEntry(io.RawIOBase):
    """One file in an archive, readable in order."""

    def __init__(self, archive: ArchiveReader, name: str, n_bytes: int) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self._archive = archive
        self._at = 0
        self._sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n_read = self._archive.readinto(memoryview(buffer)[: self.n_bytes - self._at])
        self._sha256.update(memoryview(buffer)[:n_read])
        self._at += n_read
        return n_read

    def sha256(self) -> str:
        """Of what was read so far, in hex."""
        return self._sha256.hexdigest()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Only to where it is: a record is read from its first byte to its last."""
        if (offset, whence) != (self._at, io.SEEK_SET):
            raise BadRecord(f"{self.name} is out of order")
        return offset

    def is_at_end(self) -> bool:
        return self._at == self.n_bytes


def _header(name: str, n_bytes: int) -> bytes:
    if n_bytes > MAX_ENTRY_BYTES:
        raise ValueError(f"{n_bytes} bytes do not fit into an entry")
    mode, owner, time = b"0000600\0", b"0000000\0", b"00000000000\0"
    fields = [name.encode(), mode, owner, owner, b"%011o\0" % n_bytes, time]
    rest = [FILE, b"", MAGIC, b"", b"", b"", b"", b""]
    return LAYOUT.pack(*fields, _checksum(LAYOUT.pack(*fields, b"", *rest)), *rest)


def _checksum(block: bytes) -> bytes:
    """Of a header, its own eight bytes taken as spaces."""
    return b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * ord(" "))


def _padding(n_bytes: int, unit: int) -> bytes:
    return bytes(-n_bytes % unit)

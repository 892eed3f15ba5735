"""The file format of a block record: safetensors that any reader opens, with digests.

    8 bytes   length of the header, little-endian
    header    JSON: one entry for each tensor, and under `__metadata__` two strings:
                keepwarm   JSON: version, namespace, key, parent, part, number, tokens, extra,
                           digests
                digest     xxh3-128 of the string above and of every tensor entry
    data      the tensors, without gaps, in the order of the header

A tensor's digest covers its name, dtype, shape and bytes. In a sealed store the header except sizes
is sealed, and so is each tensor. Everything is checked before it is used: sizes before anything is
allocated, the header before a tensor is read, a tensor before it is returned.
"""

from __future__ import annotations

import os
import struct
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import xxhash
from pydantic_core import from_json

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace, block_key
from keepwarm.prefix.fingerprint import FORMAT_VERSION, NAMESPACE_BYTES
from keepwarm.records.cipher import OVERHEAD, TAG_BYTES, Cipher
from keepwarm.records.header import (
    HasBytes,
    HeaderText,
    LazyTensors,
    dumps,
    entry_json,
    label,
    parse_table,
    whole,
)

MAX_HEADER_BYTES = 4 << 20  # JSON takes up to 20 times as much memory


class Part(StrEnum):
    DELTA = "d"
    WINDOW = "w"
    STATE = "s"


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def n_bytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True)
class Header:
    """`extra` is plain JSON for the room that made the record."""

    namespace: Namespace
    key: BlockKey
    parent: BlockKey
    part: Part
    number: int
    tokens: bytes
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    @property
    def w_rows(self) -> int:
        """How many of the block's last window rows it has."""
        return int(self.extra.get("w_rows", 0)) if self.part is Part.WINDOW else 0

    def improves_on(self, w_rows: int) -> bool:
        """Rows slide out of the window while decoding; a later prefill may capture more of them."""
        return self.part is Part.WINDOW and self.w_rows > w_rows


class PrefillTime(NamedTuple):
    """What prefilling a block took when it was computed, and on which kind of machine."""

    seconds: float
    machine: str


@dataclass(frozen=True)
class Record:
    header: Header
    tensors: Sequence[HasBytes]
    prefill: PrefillTime | None = None  # kept in the index, not in the file; None: not known

    @cached_property
    def n_bytes(self) -> int:
        if isinstance(self.tensors, LazyTensors):
            return self.tensors.n_bytes
        return sum(tensor.n_bytes for tensor in self.tensors)


class TensorEntry(NamedTuple):
    """The position of a tensor in the data, and the digest of its label and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    label: bytes
    digest: str

    def fits(self, pieces: Sequence[Any]) -> bool:
        """Whether these are its bytes."""
        return _digest(self.label, pieces) == self.digest


class VerifiedHeader(NamedTuple):
    """A verified header, and where the data starts in the file."""

    header: Header
    entries: tuple[TensorEntry, ...]
    data_start: int
    cipher: Cipher | None = None

    @property
    def n_bytes(self) -> int:
        """Of the file."""
        return self.data_start + (self.entries[-1].end if self.entries else 0)


class ReadBuffer:
    """Reused memory to read into: the first use of memory costs more than all later ones."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, n_bytes: int) -> memoryview:
        """The first `n_bytes`; overwrites what was taken before."""
        if len(self._bytes) < n_bytes:
            self._bytes = bytearray(n_bytes)
        return memoryview(self._bytes)[:n_bytes]


class UnreadTensor:
    """A tensor still in its file; `data` reads and verifies it.

    The bytes are in the buffer, valid until the next tensor is read.
    """

    def __init__(self, data: _Data, entry: TensorEntry, buffer: ReadBuffer) -> None:
        self.name, self.dtype, self.shape = entry.name, entry.dtype, entry.shape
        self._data, self._entry, self._buffer = data, entry, buffer

    @property
    def data(self) -> memoryview:
        return self._data.read(self._entry, self._buffer)

    def read_into(self, pieces: Sequence[Any]) -> None:
        """Read into these pieces of memory in order instead; their content is undefined if this
        raises."""
        if self._data.cipher is None:
            self._data.read_verified(self._entry, pieces)
            return
        rest = self.data
        for piece in map(_bytes_of, pieces):
            piece[:], rest = rest[: len(piece)], rest[len(piece) :]


class RecordView(NamedTuple):
    """A record whose tensors may still be in its file."""

    header: Header
    tensors: Sequence[HasBytes | UnreadTensor]


def encode_record(record: Record, cipher: Cipher | None = None) -> list[bytes | memoryview]:
    """The file as buffers to be written in order; unsealed tensors are not copied."""
    stored = [_stored(record.header, tensor, cipher) for tensor in record.tensors]
    table, at = {}, 0
    for tensor, (data, _) in zip(record.tensors, stored, strict=True):
        end = at + memoryview(data).nbytes
        table[tensor.name] = entry_json(tensor.dtype, tensor.shape, at, end)
        at = end
    digests = {t.name: digest for t, (_, digest) in zip(record.tensors, stored, strict=True)}
    payload = dumps({**_header_json(record.header), "digests": digests})
    head = HeaderText({"keepwarm": payload}, table)
    head.metadata["digest"] = head.digest(payload)
    text = (head if cipher is None else head.sealed(cipher)).padded()
    return [struct.pack("<Q", len(text)), text, *(data for data, _ in stored)]


def open_record(
    file: BinaryIO, file_bytes: int | None, cipher: Cipher | None = None
) -> VerifiedHeader:
    """Read and verify the header; raises BadRecord with the reason. None: the header alone says how
    many bytes the file has.

    NewerFormat is raised only after the digest has shown that the version is no flipped bit. A
    sealed record without a key is not bad: that raises PermissionError.
    """
    n_header = struct.unpack("<Q", _exactly(file, 8))[0]
    if n_header > MAX_HEADER_BYTES or (file_bytes is not None and n_header > file_bytes - 8):
        raise BadRecord(f"the header claims {n_header} bytes")
    text = _exactly(file, n_header)
    try:
        head = HeaderText.parse(text)
        if text != head.padded():  # duplicate names, for example: readers differ in which they take
            raise BadRecord("the header is not canonical")
        head = head.opened(cipher)
        payload = head.metadata["keepwarm"]
        if head.digest(payload) != head.metadata["digest"]:
            raise BadRecord("the header does not match its digest")
        return _parse(from_json(payload), head.entries, 8 + n_header, file_bytes, cipher)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecord(f"the header cannot be read ({type(error).__name__})") from error


def check_identity(header: Header, key: BlockKey, part: Part) -> None:
    """Raise unless this is the requested record and its key is the hash of its tokens."""
    if header.key != key or header.part is not part:
        raise BadRecord("it is another record under this name")
    if block_key(header.namespace, header.parent, header.tokens) != key:
        raise BadRecord("its key is not the hash of its tokens")


def read_tensors(
    file: BinaryIO, opened: VerifiedHeader, names: Collection[str] | None = None
) -> tuple[Tensor, ...]:
    """The named tensors (default: all), verified; reads no other bytes of the file."""
    data = _Data(file, opened)
    wanted = [e for e in opened.entries if names is None or e.name in names]
    return tuple(Tensor(e.name, e.dtype, e.shape, data.read(e, ReadBuffer())) for e in wanted)


def read_record(
    file: BinaryIO, opened: VerifiedHeader, names: Collection[str] | None = None
) -> Record:
    """The record with the named tensors, in new memory."""
    return Record(opened.header, read_tensors(file, opened, names))


def view_record(file: BinaryIO, opened: VerifiedHeader, buffer: ReadBuffer) -> RecordView:
    """The record with its tensors still in the file, which must stay open."""
    data = _Data(file, opened)
    return RecordView(
        opened.header, tuple(UnreadTensor(data, entry, buffer) for entry in opened.entries)
    )


def tensor_digest(tensor: HasBytes) -> str:
    return _digest(label(tensor.name, tensor.dtype, tensor.shape), [tensor.data])


def _digest(label: bytes, pieces: Sequence[Any]) -> str:
    hasher = xxhash.xxh3_128(label)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


class _Data:
    """The data of an open record, tensor by tensor."""

    def __init__(self, file: BinaryIO, opened: VerifiedHeader) -> None:
        self.cipher = opened.cipher
        self._file, self._opened = file, opened
        self._at = -1  # the file's position in the data; -1 if unknown

    def read(self, entry: TensorEntry, buffer: ReadBuffer) -> memoryview:
        memory = buffer.take(entry.end - entry.start)
        self.read_verified(entry, [memory])
        if self.cipher is None:
            return memory
        return memoryview(self.cipher.open(_sealed_name(self._opened.header, entry), memory))

    def read_verified(self, entry: TensorEntry, pieces: Sequence[Any]) -> None:
        """The bytes as stored, encrypted or not."""
        if self._at != entry.start:
            self._file.seek(self._opened.data_start + entry.start)
        self._at = -1
        _fill_all(pieces, entry.end - entry.start, self._file)
        self._at = entry.end
        is_whole = entry.fits(pieces) if self.cipher is None else _tag(pieces[0]) == entry.digest
        if not is_whole:
            raise BadRecord(f"{entry.name} does not match its digest")


class _Payload(NamedTuple):
    """The bytes of a tensor as stored, and their digest or tag."""

    data: bytes | memoryview
    digest: str


def _stored(header: Header, tensor: HasBytes, cipher: Cipher | None) -> _Payload:
    if cipher is None:
        return _Payload(tensor.data, tensor_digest(tensor))
    data = cipher.seal(_sealed_name(header, tensor), tensor.data)
    return _Payload(data, _tag(data))


def _sealed_name(header: Header, of: HasBytes | TensorEntry) -> bytes:
    whose = [header.key.hex(), header.part.value]
    return dumps([*whose, of.name, of.dtype, list(of.shape)]).encode()


def _tag(data: bytes | memoryview) -> str:
    """The tag of AES-GCM; in the sealed header it binds the bytes to their record."""
    return bytes(data[-TAG_BYTES:]).hex()


def _parse(
    payload: dict[str, Any], table: str, data_start: int, n_file: int | None, cipher: Cipher | None
) -> VerifiedHeader:
    version = whole(payload["version"], least=1)
    if version > FORMAT_VERSION:
        raise NewerFormat(f"format version {version} is newer than {FORMAT_VERSION}")
    tokens, extra = b64decode(payload["tokens"], validate=True), dict(payload["extra"])
    _check_counts(tokens, extra)
    header = Header(
        namespace=Namespace(_hex(payload["namespace"], NAMESPACE_BYTES)),
        key=BlockKey(_hex(payload["key"], KEY_BYTES)),
        parent=BlockKey(_hex(payload["parent"], KEY_BYTES)),
        part=Part(payload["part"]),
        number=whole(payload["number"]),
        tokens=tokens,
        extra=extra,
        version=version,
    )
    places, digests = parse_table(table, 0 if cipher is None else OVERHEAD), payload["digests"]
    entries = tuple(TensorEntry(*place, digests[place.name]) for place in places)
    opened = VerifiedHeader(header, entries, data_start, cipher)
    if n_file not in (None, opened.n_bytes):
        raise BadRecord(f"the file has {n_file} bytes, its header says {opened.n_bytes}")
    return opened


def _check_counts(tokens: bytes, extra: Mapping[str, Any]) -> None:
    n_tokens, rest = divmod(len(tokens), 4)
    if rest or not 0 < n_tokens <= BLOCK_TOKENS:
        raise BadRecord(f"{len(tokens)} bytes of token ids are not a block")
    if whole(extra.get("w_rows", 0)) > n_tokens:
        raise BadRecord("it claims more window rows than tokens")


def _header_json(header: Header) -> dict[str, Any]:
    return {
        "version": header.version,
        "namespace": header.namespace.hex(),
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "part": header.part.value,
        "number": header.number,
        "tokens": b64encode(header.tokens).decode(),
        "extra": dict(header.extra),
    }


def _hex(text: str, n_bytes: int) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != n_bytes:
        raise BadRecord(f"a key has {len(value)} bytes instead of {n_bytes}")
    return value


def _exactly(file: BinaryIO, n: int) -> bytearray:
    data = bytearray(n)
    _fill(memoryview(data), file)
    return data


def _fill_all(pieces: Sequence[Any], n_bytes: int, file: BinaryIO) -> None:
    """All pieces in one system call, and the rest piece by piece if that reads less."""
    n_read = os.readv(file.fileno(), pieces) if len(pieces) > 1 else 0
    if n_read == n_bytes:
        return
    for piece in map(_bytes_of, pieces):
        _fill(piece[n_read:], file)
        n_read = max(0, n_read - len(piece))


def _bytes_of(piece: Any) -> memoryview:
    return memoryview(piece).cast("B")


def _fill(data: memoryview, file: BinaryIO) -> None:
    """Read until it is full: a single read may be short before the end of the file."""
    while data:
        n_read = file.readinto(data)  # type: ignore[attr-defined]
        if not n_read:
            raise BadRecord("the file is cut short")
        data = data[n_read:]

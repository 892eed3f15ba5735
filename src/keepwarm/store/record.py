"""The file format of a block record: safetensors that any reader opens, and that proves itself.

    8 bytes   length of the header, little-endian
    header    JSON: one entry a tensor, and under `__metadata__` two strings:
                keepwarm   JSON: version, namespace, key, parent, part, number, tokens, extra,
                           digests
                digest     xxh3-128 of the string above and of every tensor entry
    data      the tensors, without gaps, in the order of the header

A tensor's digest covers its name, dtype, shape and bytes. In a sealed store all of the header but
sizes is sealed, and every tensor for itself. Nothing is believed before it is checked:
sizes before anything is allocated, the header before a tensor is read, a tensor before it is used.
"""

from __future__ import annotations

import json
import math
import struct
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, BinaryIO, NamedTuple

import xxhash

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace, block_key
from keepwarm.prefix.fingerprint import FORMAT_VERSION, NAMESPACE_BYTES
from keepwarm.store.header_text import (
    dumps,
    entry_json,
    header_digest,
    header_text,
    label,
    opened_head,
    sealed_head,
)
from keepwarm.store.seal import OVERHEAD, TAG_BYTES, Seal

MAX_HEADER_BYTES = 32 << 20
MAX_COUNT = (1 << 47) - 1  # of anything: no file is longer, and no array has more items
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


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
    """What a record says of itself. `extra` is for the room that made it, as plain JSON."""

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
        """How many of the block's last window rows are inside."""
        return int(self.extra.get("w_rows", 0)) if self.part is Part.WINDOW else 0

    def improves_on(self, w_rows: int) -> bool:
        """Window rows slide out while decoding; a later prefill may bring more of them."""
        return self.part is Part.WINDOW and self.w_rows > w_rows


@dataclass(frozen=True)
class Record:
    header: Header
    tensors: tuple[Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)


class Entry(NamedTuple):
    """Where a tensor lies in the data, and what its bytes must hash to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    digest: str


class Opened(NamedTuple):
    """A verified header, and where the data begins in the file."""

    header: Header
    entries: tuple[Entry, ...]
    data_start: int
    seal: Seal | None = None


class Buffer:
    """Memory to read into, used over and over: its first use costs more than all later ones."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, n_bytes: int) -> memoryview:
        """So many bytes of it; those taken before are given up."""
        if len(self._bytes) < n_bytes:
            self._bytes = bytearray(n_bytes)
        return memoryview(self._bytes)[:n_bytes]


class Unread:
    """A tensor still in its file: its bytes are read and verified when they are asked for.

    They lie in the buffer, and are good until the next ones are asked for.
    """

    def __init__(self, file: BinaryIO, opened: Opened, entry: Entry, buffer: Buffer) -> None:
        self.name, self.dtype, self.shape = entry.name, entry.dtype, entry.shape
        self._file, self._opened, self._entry = file, opened, entry
        self._buffer = buffer

    @property
    def data(self) -> memoryview:
        return _read_one(self._file, self._opened, self._entry, self._buffer).data

    def read_into(self, memory: memoryview) -> None:
        """Put the bytes there instead; what lies there is of no use where this raises."""
        if self._opened.seal is None:
            _read_verified(self._file, self._opened, self._entry, memory)
        else:
            memory[:] = self.data


class Visit(NamedTuple):
    """A record where it lies."""

    header: Header
    tensors: tuple[Tensor | Unread, ...]


def pieces(record: Record, seal: Seal | None = None) -> list[bytes | memoryview]:
    """The file as buffers to be written one after another; unsealed tensors are not copied."""
    stored = [_stored(record.header, tensor, seal) for tensor in record.tensors]
    table, at = {}, 0
    for tensor, (data, _) in zip(record.tensors, stored, strict=True):
        end = at + memoryview(data).nbytes
        table[tensor.name] = entry_json(tensor.dtype, tensor.shape, at, end)
        at = end
    digests = {t.name: digest for t, (_, digest) in zip(record.tensors, stored, strict=True)}
    said = dumps({**_header_json(record.header), "digests": digests})
    head = {"__metadata__": {"keepwarm": said, "digest": header_digest(said, table)}, **table}
    text = header_text(head if seal is None else sealed_head(head, seal))
    return [struct.pack("<Q", len(text)), text, *(data for data, _ in stored)]


def open_record(file: BinaryIO, file_bytes: int, seal: Seal | None = None) -> Opened:
    """Read and verify the header; raises BadRecord, with the reason, for anything else.

    NewerFormat comes after the digest, which shows that the version is no flipped bit. A sealed
    record is no bad one where there is no key: that is a PermissionError.
    """
    n_header = struct.unpack("<Q", _exactly(file, 8))[0]
    if n_header > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise BadRecord(f"the header claims {n_header} bytes")
    text = _exactly(file, n_header)
    try:
        head = json.loads(text)
        if text != header_text(head):  # a name given twice, say: readers differ in what they take
            raise BadRecord("the header is not written as the format says")
        head = opened_head(head, seal)
        metadata = head.pop("__metadata__")
        said, digest = metadata["keepwarm"], metadata["digest"]
        if header_digest(said, head) != digest:
            raise BadRecord("the header does not match its digest")
        return _parse(json.loads(said), head, 8 + n_header, file_bytes, seal)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecord(f"the header cannot be read ({type(error).__name__})") from error


def check_identity(header: Header, key: BlockKey, part: Part) -> None:
    """A record must be the one it was asked for, and its key the hash of what it says."""
    if header.key != key or header.part is not part:
        raise BadRecord("it is another record under this name")
    if block_key(header.namespace, header.parent, header.tokens) != key:
        raise BadRecord("its key is not the hash of its tokens")


def read_tensors(
    file: BinaryIO, opened: Opened, names: Collection[str] | None = None
) -> tuple[Tensor, ...]:
    """The named tensors (default: all), each verified; reads no other bytes of the file."""
    wanted = [e for e in opened.entries if names is None or e.name in names]
    return tuple(_read_one(file, opened, entry, Buffer()) for entry in wanted)


def record_of(file: BinaryIO, opened: Opened, names: Collection[str] | None = None) -> Record:
    """The record with the named tensors, in memory of its own."""
    return Record(opened.header, read_tensors(file, opened, names))


def unread(file: BinaryIO, opened: Opened, buffer: Buffer) -> Visit:
    """The record with its tensors still in the file, which must stay open."""
    tensors = tuple(Unread(file, opened, entry, buffer) for entry in opened.entries)
    return Visit(opened.header, tensors)


def tensor_digest(tensor: Tensor) -> str:
    hasher = xxhash.xxh3_128(label(tensor.name, tensor.dtype, tensor.shape))
    hasher.update(tensor.data)
    return hasher.hexdigest()


def _read_one(file: BinaryIO, opened: Opened, entry: Entry, buffer: Buffer) -> Tensor:
    data = buffer.take(entry.end - entry.start)
    tensor = _read_verified(file, opened, entry, data)
    if opened.seal is None:
        return tensor
    return tensor._replace(data=_unsealed(opened.header, tensor, opened.seal))


def _read_verified(file: BinaryIO, opened: Opened, entry: Entry, memory: memoryview) -> Tensor:
    """The bytes as they lie in the file, read to `memory`."""
    file.seek(opened.data_start + entry.start)
    _fill(memory, file)
    tensor = Tensor(entry.name, entry.dtype, entry.shape, memory)
    digest = tensor_digest(tensor) if opened.seal is None else _tag(memory)
    if digest != entry.digest:
        raise BadRecord(f"{entry.name} does not match its digest")
    return tensor


class Stored(NamedTuple):
    """The bytes of a tensor as they lie in the file, and what proves them."""

    data: bytes | memoryview
    digest: str


def _stored(header: Header, tensor: Tensor, seal: Seal | None) -> Stored:
    if seal is None:
        return Stored(tensor.data, tensor_digest(tensor))
    data = seal.seal(_sealed_name(header, tensor), tensor.data)
    return Stored(data, _tag(data))


def _unsealed(header: Header, tensor: Tensor, seal: Seal) -> memoryview:
    return memoryview(seal.open(_sealed_name(header, tensor), tensor.data))


def _sealed_name(header: Header, tensor: Tensor) -> bytes:
    whose = [header.key.hex(), header.part.value]
    return dumps([*whose, tensor.name, tensor.dtype, list(tensor.shape)]).encode()


def _tag(data: bytes | memoryview) -> str:
    """What AES-GCM proves the bytes with; in the sealed header it binds them to their record."""
    return bytes(data[-TAG_BYTES:]).hex()


def _parse(
    said: dict[str, Any], table: dict[str, Any], data_start: int, n_file: int, seal: Seal | None
) -> Opened:
    version = _whole(said["version"], least=1)
    if version > FORMAT_VERSION:
        raise NewerFormat(f"format version {version} is newer than {FORMAT_VERSION}")
    tokens, extra = b64decode(said["tokens"], validate=True), dict(said["extra"])
    _check_counts(tokens, extra)
    header = Header(
        namespace=Namespace(_hex(said["namespace"], NAMESPACE_BYTES)),
        key=BlockKey(_hex(said["key"], KEY_BYTES)),
        parent=BlockKey(_hex(said["parent"], KEY_BYTES)),
        part=Part(said["part"]),
        number=_whole(said["number"]),
        tokens=tokens,
        extra=extra,
        version=version,
    )
    entries = tuple(_entries(table, said["digests"], 0 if seal is None else OVERHEAD))
    end = entries[-1].end if entries else 0
    if data_start + end != n_file:
        raise BadRecord(f"the file has {n_file} bytes, its header says {data_start + end}")
    return Opened(header, entries, data_start, seal)


def _check_counts(tokens: bytes, extra: Mapping[str, Any]) -> None:
    n_tokens, rest = divmod(len(tokens), 4)
    if rest or not 0 < n_tokens <= BLOCK_TOKENS:
        raise BadRecord(f"{len(tokens)} bytes of token ids are no block")
    if _whole(extra.get("w_rows", 0)) > n_tokens:
        raise BadRecord("it claims more window rows than tokens")


def _entries(
    table: Mapping[str, Any], digests: Mapping[str, str], overhead: int
) -> Iterable[Entry]:
    at = 0
    for name, entry in table.items():
        start, end = map(_whole, entry["data_offsets"])
        shape = tuple(map(_whole, entry["shape"]))
        n_bytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
        if start != at or end - start != n_bytes + overhead:
            raise BadRecord(f"{name} does not lie where its shape says")
        yield Entry(name, entry["dtype"], shape, start, end, digests[name])
        at = end


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


def _whole(value: Any, least: int = 0) -> int:
    """A count that JSON gave; it has other numbers too, and larger ones than any file."""
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise BadRecord("a number in the header is none that can be")
    return value


def _exactly(file: BinaryIO, n: int) -> bytearray:
    data = bytearray(n)
    _fill(memoryview(data), file)
    return data


def _fill(data: memoryview, file: BinaryIO) -> None:
    """All of it, in as many reads as it takes: one may be short before the end."""
    while data:
        n_read = file.readinto(data)  # type: ignore[attr-defined]
        if not n_read:
            raise BadRecord("the file is cut short")
        data = data[n_read:]

"""Whole records in memory, as they go over a network: as in a file, or coded as fewer bytes.

A code loses nothing. Of every bf16 number it has the low byte as it is, and the high byte, which is
sign and most of the exponent and much alike in all, in a Huffman code:

    7 bytes   "kwcoded", which is no length of a header
    1 byte    version of the code
    8 bytes   bytes of the record, little-endian
    8 bytes   xxh3-64 of the 16 above
    n bytes   the record up to its data
    n bytes   the data without the high bytes of bf16 tensors
    the rest  these, as one raw deflate stream
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import xxhash

from keepwarm.errors import BadRecord, NewerFormat
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
    MAX_HEADER_BYTES,
    Record,
    Tensor,
    VerifiedHeader,
    open_record,
    read_record,
)

MAX_RECORD_BYTES = 1 << 30
CODED = "BF16"  # fp16 saves too little: 15 %
MAGIC = b"kwcoded"
VERSION = 1
FRONT = struct.Struct("<7sBQ8s")
SAMPLE_BYTES = 1 << 18  # of a record, by which the time is estimated that decoding takes
MAX_SHARE = 0.9  # of its bytes that a coded record may have

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Piece = bytes | memoryview


def memory_for(n_bytes: int) -> memoryview:
    """To read a record into; a bytearray would be filled with zeros first."""
    if n_bytes > MAX_RECORD_BYTES:
        raise BadRecord(f"{n_bytes} bytes are too many for a record")
    return np.empty(n_bytes, np.uint8).data


def decode_record(data: memoryview, cipher: Cipher | None = None) -> Record:
    """The record, verified as one on disk is; its tensors share the memory, unless sealed."""
    if cipher is not None:
        file = BytesIO(data)
        return read_record(file, open_record(file, len(data), cipher))
    opened = _open(data, len(data))
    tensors, first = [], opened.data_start
    for entry in opened.entries:
        own = data[first + entry.start : first + entry.end]
        if not entry.fits([own]):
            raise BadRecord(f"{entry.name} does not match its digest")
        tensors.append(Tensor(entry.name, entry.dtype, entry.shape, own))
    return Record(opened.header, tuple(tensors))


def code_record(
    record: Record,
    pieces: Sequence[Piece],
    bytes_per_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Sequence[Piece]:
    """The pieces of an encoded record, coded if reading and decoding it takes less time than
    reading more bytes at this rate. Nobody waits for coding, which takes twice as long.
    """
    numbers = [tensor.dtype == CODED for tensor in record.tensors]
    length, header, *data = pieces
    if not any(numbers) or not _saves_time(_sample(data, numbers), bytes_per_s, clock):
        return pieces
    rest, high = _code(data, numbers)
    n_bytes = count_bytes(pieces)
    front = MAGIC + bytes([VERSION]) + struct.pack("<Q", n_bytes)
    coded = [front, xxhash.xxh3_64(front).digest(), length, header, *rest, *high]
    return coded if count_bytes(coded) <= MAX_SHARE * n_bytes else pieces


def count_bytes(pieces: Sequence[Piece]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


class Start(NamedTuple):
    """How the bytes of a record start, and how many they are; both not counting a code."""

    data: memoryview
    n_bytes: int
    is_coded: bool


def find_start(data: memoryview, n_bytes: int) -> Start:
    """Of the first of `n_bytes` bytes, coded or not; at least the length of the header is there."""
    if data[: len(MAGIC)] != MAGIC:
        if len(data) < 8:
            raise BadRecord("the file is cut short")
        return Start(data, n_bytes, False)
    if len(data) < FRONT.size + 8:
        raise BadRecord("the code is cut short")
    _, version, n_plain, digest = FRONT.unpack_from(data)
    if xxhash.xxh3_64(data[: FRONT.size - len(digest)]).digest() != digest:
        raise BadRecord("the code does not match its digest")
    if version > VERSION:
        raise NewerFormat(f"version {version} of the code is newer than {VERSION}")
    if n_plain > MAX_RECORD_BYTES:
        raise BadRecord(f"it claims {n_plain} bytes")
    return Start(data[FRONT.size :], n_plain, True)


def undo_code(data: memoryview) -> memoryview:
    """The bytes of a record as in a file; they are not verified.

    A wrong claim costs little memory: the stream is at the end, so at least half of what is
    allocated is there.
    """
    coded, n_bytes, is_coded = find_start(data, len(data))
    if not is_coded:
        return data
    try:
        opened = _open(coded, n_bytes)
    except PermissionError as error:
        raise BadRecord("it is encrypted and coded") from error
    n_high = sum(e.end - e.start for e in opened.entries if e.dtype == CODED) // 2
    n_rest = n_bytes - n_high
    high, rest = _inflate(coded[n_rest:], n_high), np.frombuffer(coded[:n_rest], np.uint8)
    record = np.empty(n_bytes, np.uint8)
    record[: opened.data_start], rest = np.split(rest, [opened.data_start])
    for entry in opened.entries:
        own = record[opened.data_start + entry.start : opened.data_start + entry.end]
        if entry.dtype == CODED:
            (low, rest), (top, high) = (np.split(part, [len(own) // 2]) for part in (rest, high))
            _join(low, top, own)
        else:
            own[:], rest = np.split(rest, [len(own)])
    return record.data


def _open(data: memoryview, n_bytes: int) -> VerifiedHeader:
    if len(data) < 8:
        raise BadRecord("the file is cut short")
    n_header = min(struct.unpack_from("<Q", data)[0], MAX_HEADER_BYTES)
    return open_record(BytesIO(data[: 8 + n_header]), n_bytes)


def _sample(data: Sequence[Piece], numbers: Sequence[bool]) -> Bytes:
    """From the largest tensor."""
    coded = (_bytes_of(piece) for piece, is_coded in zip(data, numbers, strict=True) if is_coded)
    return max(coded, key=len)[:SAMPLE_BYTES]


def _saves_time(sample: Bytes, bytes_per_s: float, clock: Callable[[], float]) -> bool:
    rest, high = (b"".join(pieces) for pieces in _code([sample.data], [True]))
    began = clock()
    _join(_bytes_of(rest), _inflate(memoryview(high), len(rest)), np.empty_like(sample))
    return sample.nbytes - len(rest) - len(high) > (clock() - began) * bytes_per_s


def _code(data: Sequence[Piece], numbers: Sequence[bool]) -> tuple[list[Piece], list[Piece]]:
    """The data without the high bytes of numbers, and these as a stream."""
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    rest: list[Piece] = []
    high: list[Piece] = []
    for piece, is_coded in zip(data, numbers, strict=True):
        if is_coded:
            high.append(stream.compress(_bytes_of(piece)[1::2].copy().data))
            rest.append(_bytes_of(piece)[::2].copy().data)
        else:
            rest.append(piece)
    return rest, [*high, stream.flush()]


def _join(low: Bytes, high: Bytes, numbers: Bytes) -> None:
    numbers[::2], numbers[1::2] = low, high


def _inflate(stream: memoryview, n_bytes: int) -> Bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = inflater.decompress(stream, n_bytes + 1)
    except zlib.error as error:
        raise BadRecord(f"the code cannot be read ({error})") from error
    if len(found) != n_bytes or not inflater.eof or inflater.unused_data:
        raise BadRecord(f"the code is not one of {n_bytes} bytes")
    return np.frombuffer(found, np.uint8)


def _bytes_of(piece: Piece) -> Bytes:
    return np.frombuffer(piece, np.uint8)

"""Records in a remote store: their names, and what is believed of them.

A name tells what a look-up wants to know, so that no record is read for it:

    <compute class>/<namespace>/<parent>/<tokens>.<key>.<part>.<window rows>

So the records that follow a block lie in one folder, begun blocks before whole ones. With a fleet
key a name ends in `.mac`, and the bytes in a MAC of name and record: digests in a record show
damage, but anybody can make them fit. Sealed records need none.

Beside the records lie token ids of past answers, for conversations that move to another machine:

    <compute class>/<namespace>/<digest of the prompt's text>/001.<key>.a.0

A pointer lies beside the block that the answer ends in, so that they are deleted with that:

    <compute class>/<namespace>/<parent>/256.<key>.a<digest of the text><key of the answers>.0

The compute class is what numbers depend on besides the namespace, such as backend and version of
MLX. Machines of different classes compute slightly different keys and values, so that an answer
would depend on who computed the prompt: they share nothing, unless they are told to. All classes
are listed in the folder `classes`.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from io import BytesIO
from typing import NamedTuple

from keepwarm.concurrency import CallDeadline
from keepwarm.errors import BadInput, BadRecord, NewerFormat
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import (
    MAX_HEADER_BYTES,
    Header,
    Part,
    Record,
    VerifiedHeader,
    check_identity,
    open_record,
)
from keepwarm.remote.backend import Backend, Listed, new_memory
from keepwarm.remote.compression import decode_record, find_start, undo_code

CLASSES = "classes"
ANSWERS = "a"  # in a name, in place of a part
CLASS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # other files may lie beside them
LAST = re.compile(
    rf"(\d{{3}})\.([0-9a-f]{{{2 * KEY_BYTES}}})\.([a-z][0-9a-f]*)\.(\d{{1,3}})(\.mac)?"
)
POINTER = re.compile(
    rf"{BLOCK_TOKENS}\.\w+\.{ANSWERS}" + 2 * rf"([0-9a-f]{{{2 * KEY_BYTES}}})" + r"\.0"
)
MAC_BYTES = 32
FLEET_KEY_BYTES = 32
HEADER_GUESS = 1 << 16  # bytes; most headers are shorter


class RemoteRecord(NamedTuple):
    """A record in a remote store, as its name tells."""

    namespace: Namespace
    parent: BlockKey
    key: BlockKey
    part: Part
    n_tokens: int
    w_rows: int = 0
    n_bytes: int = 0  # that are sent; in no name
    compute_class: str = ""  # "" is that of this machine

    @classmethod
    def of(cls, header: Header) -> RemoteRecord:
        n_tokens = len(header.tokens) // 4
        return cls(
            header.namespace, header.parent, header.key, header.part, n_tokens, header.w_rows
        )


class LastWord(NamedTuple):
    """What the last word of a name tells."""

    key: BlockKey
    part: Part | None  # None: it is not a record
    n_tokens: int
    w_rows: int
    has_mac: bool


def parse_last(name: str) -> LastWord | None:
    """None if it is not one of ours."""
    found = LAST.fullmatch(name.rpartition("/")[2])
    if found is None:
        return None
    tokens, key, part, rows, mac = found.groups()
    try:
        kind = None if part.startswith(ANSWERS) else Part(part)
        word = LastWord(BlockKey(bytes.fromhex(key)), kind, int(tokens), int(rows), bool(mac))
    except ValueError:
        return None
    is_possible = 0 < word.n_tokens <= BLOCK_TOKENS and word.w_rows <= word.n_tokens
    return word if is_possible else None


class RemoteNames:
    """Names that a machine of a compute class uses."""

    def __init__(self, compute_class: str, has_mac: bool = False) -> None:
        self._compute_class = compute_class
        self._has_mac = has_mac

    def of(self, record: RemoteRecord) -> str:
        folder = self.folder(record.namespace, record.parent, record.compute_class)
        stem = self.stem(record.n_tokens, record.key)
        mac = ".mac" if self._has_mac else ""
        return f"{folder}/{stem}{record.part.value}.{record.w_rows}{mac}"

    def of_answers(self, namespace: Namespace, text: str, answers: bytes) -> str:
        """For what is told of a conversation; equal names have equal content."""
        key = blake2b(answers, digest_size=KEY_BYTES, key=namespace, person=b"keepwarm.told.1")
        mac = ".mac" if self._has_mac else ""
        return f"{self.answers_to(namespace, text)}/001.{key.hexdigest()}.{ANSWERS}.0{mac}"

    def answers_to(self, namespace: Namespace, text: str) -> str:
        """The folder of them."""
        digest = blake2b(digest_size=KEY_BYTES, key=namespace, person=b"keepwarm.text.1")
        digest.update(text.encode("utf-8", "surrogatepass"))
        return self.folder(namespace, BlockKey(digest.digest()))

    def of_pointer(self, namespace: Namespace, parent: BlockKey, key: BlockKey, told: str) -> str:
        """Tells the name of what is told, and comes after all names that look-ups want."""
        *_, text, last = told.split("/")
        digests = text + last.split(".")[1]
        return (
            f"{self.folder(namespace, parent)}/{self.stem(BLOCK_TOKENS, key)}{ANSWERS}{digests}.0"
        )

    def told_by(self, namespace: Namespace, name: str) -> list[str]:
        """What a pointer stands for, with a MAC or without; none if it is none."""
        if (found := POINTER.fullmatch(name.rpartition("/")[2])) is None:
            return []
        told = f"{self._compute_class}/{namespace.hex()}/{found[1]}/001.{found[2]}.{ANSWERS}.0"
        return [told, f"{told}.mac"]

    def folder(self, namespace: Namespace, parent: BlockKey, compute_class: str = "") -> str:
        return f"{compute_class or self._compute_class}/{namespace.hex()}/{parent.hex()}"

    def stem(self, n_tokens: int, key: BlockKey) -> str:
        """How the names of a block's records begin, within their folder."""
        return f"{n_tokens:03d}.{key.hex()}."

    def parse(
        self, listed: Listed, namespace: Namespace, parent: BlockKey, compute_class: str = ""
    ) -> RemoteRecord | None:
        """The record of a listed name; None if it is not one that this machine uses."""
        word = parse_last(listed.name)
        if word is None or word.has_mac != self._has_mac or listed.n_bytes <= 0:
            return None
        key, part, n_tokens, w_rows, _ = word
        if part is None:
            return None
        return RemoteRecord(
            namespace, parent, key, part, n_tokens, w_rows, listed.n_bytes, compute_class
        )


def list_classes(backend: Backend, timeout_s: float) -> list[str]:
    """All that machines have put records for."""
    listed = backend.list_names(CLASSES, timeout_s)
    names = (one.name.removeprefix(f"{CLASSES}/") for one in listed)
    return sorted(name for name in names if CLASS.fullmatch(name))


class FleetKey:
    """What the machines of a fleet have in common."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def parse(cls, text: str) -> FleetKey | None:
        """From a setting; None if that is empty."""
        if not text:
            return None
        try:
            key = b64decode(text, validate=True)
        except ValueError:
            key = b""
        if len(key) != FLEET_KEY_BYTES:
            raise BadInput(
                "The fleet key is not base64 of 32 bytes; make one with: openssl rand -base64 32"
            )
        return cls(key)

    def mac(self, name: str, pieces: Sequence[bytes | memoryview]) -> bytes:
        """Of all bytes under a name, which is part of it: a class is in no record."""
        mac = blake2b(key=self._key, digest_size=MAC_BYTES, person=b"keepwarm.fleet.2")
        mac.update(name.encode() + b"\0")
        for piece in pieces:
            mac.update(piece)
        return mac.digest()

    def checked(self, name: str, data: memoryview) -> memoryview:
        """The bytes before the MAC; raises BadRecord unless a machine with this key has put them
        under this name.
        """
        record, mac = data[:-MAC_BYTES], data[-MAC_BYTES:]
        if not compare_digest(self.mac(name, [record]), bytes(mac)):
            raise BadRecord("its MAC is not made with the fleet key")
        return record


def decode_named(data: memoryview, name: RemoteRecord, cipher: Cipher | None) -> Record:
    """The verified record; raises BadRecord or NewerFormat unless it is the one of its name."""
    try:
        record = decode_record(data if cipher else undo_code(data), cipher)
    except PermissionError as error:  # no key for it; a backend would be out of order
        raise NewerFormat(str(error)) from error
    check_identity(record.header, name.key, name.part)
    stored = RemoteRecord.of(record.header)
    if (stored.n_tokens, stored.w_rows) != (name.n_tokens, name.w_rows):
        raise BadRecord("its name tells other tokens or window rows than it has")
    return record


def read_header(
    backend: Backend, cipher: Cipher | None, name: str, n_bytes: int, deadline: CallDeadline
) -> VerifiedHeader | None:
    """The header of a record that has so many bytes; None if it has none that fits its name."""
    word, n_read, n_wanted = parse_last(name), 0, HEADER_GUESS
    if word is None or word.part is None:
        return None
    try:
        while n_read < n_wanted:
            found = backend.read(name, new_memory, deadline.left_s(), n_bytes=n_wanted)
            if found is None or len(found) <= n_read:
                return None
            start = find_start(found, n_bytes - (MAC_BYTES if word.has_mac else 0))
            n_read = len(found)
            n_header = 8 + min(struct.unpack_from("<Q", start.data)[0], MAX_HEADER_BYTES)
            n_wanted = n_read - len(start.data) + n_header
        opened = open_record(BytesIO(start.data), start.n_bytes, cipher)
        check_identity(opened.header, word.key, word.part)
    except (BadRecord, NewerFormat, PermissionError):
        return None
    return opened

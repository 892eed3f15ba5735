"""An agent, or any prefix, as one file that can be moved to another machine.

A tar archive: `manifest.json` first (the model, token ids, blocks, labels), then the records as a
plain store without tenants has them, so that no key is needed to read it. An import verifies
everything and gives the blocks the importer's namespace. A bundle for other weights or another KV
dtype is refused with the reason.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE, USTAR_FORMAT, TarInfo
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

from keepwarm.agents.agent import check_metadata
from keepwarm.agents.rewriting import prefix_blocks, prefix_records, renamed
from keepwarm.agents.signing import NO_KEYS, BundleKeys, Signature, SigningKey
from keepwarm.errors import (
    BadCacheFile,
    BadRecord,
    CacheMismatch,
    CorruptBlock,
    InsufficientResources,
    NewerFormat,
)
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain, unpack
from keepwarm.prefix.fingerprint import Identity, digest, namespace, tenant_of
from keepwarm.prefix.turn import KeptTurn
from keepwarm.records.at_rest import check_codec
from keepwarm.records.cipher import stored_namespace
from keepwarm.records.record import (
    ReadBuffer,
    Record,
    RecordView,
    check_identity,
    encode_record,
    open_record,
    read_record,
    view_record,
)
from keepwarm.store.disk.disk import DiskTier, StagedRecords
from keepwarm.store.disk.maintenance import Progress, no_progress
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.names import parse_name, record_name
from keepwarm.store.tier import as_store_errors

VERSION = 1
MANIFEST = "manifest.json"
NAME = re.compile(rb"(manifest\.json|[0-9a-f]{40}\.[dws]\.safetensors)\0+")
SIZE = re.compile(rb"([0-7]{11})\0")
CheckRecord: TypeAlias = Callable[[Record | RecordView], None]
MAX_MODEL = 200  # characters of a model's name
MAX_MANIFEST_BYTES = 64 << 20  # most of it is one string, the tokens
MAX_MANIFEST_ITEMS = 1 << 18  # keys and turns; each takes more memory than it has bytes
NOT_WHOLE = (
    "Some blocks are missing or unreadable, so nothing was exported; continue the agent once to "
    "compute them again, then export it."
)
# Exceptions that reading a file that is not a bundle, or a hostile one, may raise.
PARSE_ERRORS = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """What a bundle says about itself: the model, the token ids, the blocks inside."""

    identity: Identity
    tokens: bytes
    blocks: tuple[str, ...]  # keys of the blocks inside, in hex
    turns: tuple[int, ...] = ()
    agent: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)  # the agent's labels and notes
    model: str = ""  # as its author calls it
    revision: str = ""  # of the model, if it came from the hub
    turn: KeptTurn | None = None  # the messages of the agent, if they were kept
    imported: bool = False  # whoever exported it had it from a bundle, and did not compute it
    records: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by name, if it is signed
    signature: Signature | None = None
    signed_digest: bytes = b""  # of all but the signature

    def to_json(self, key: SigningKey | None = None) -> bytes:
        fields: dict[str, Any] = {
            "version": VERSION,
            "identity": self.identity.to_json(),
            "tokens": b64encode(self.tokens).decode(),
            "blocks": self.blocks,
            "turns": self.turns,
            "agent": self.agent,
            "metadata": dict(self.metadata),
            "model": {"name": self.model, "revision": self.revision},
            "imported": self.imported,
        }
        if self.turn is not None:
            fields["messages"] = b64encode(self.turn.to_bundle()).decode()
        if key is not None:
            fields["records"] = dict(self.records)
            fields["signature"] = key.sign(_signed_digest(fields)).to_json()
        return json.dumps(fields | {"digest": digest(fields, 32)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        fields: dict[str, Any] = json.loads(text)
        if fields["version"] > VERSION:
            raise BadCacheFile("The bundle was made by a newer Keepwarm; update this one.")
        if fields.pop("digest") != digest(fields, 32):
            raise BadRecord("the manifest does not match its digest")
        if not all(type(n_tokens) is int and n_tokens >= 0 for n_tokens in fields["turns"]):
            raise BadRecord("a turn in it is not a token count")
        metadata, model = fields.get("metadata", {}), fields.get("model", {})
        if not isinstance(fields["agent"], str):
            raise BadRecord("its agent id is not text")
        texts = (*metadata, *metadata.values(), *model.values())
        if not all(isinstance(text, str) for text in texts):
            raise BadRecord("a label or the name of its model is not text")
        check_metadata(metadata)
        if not all(text.isprintable() and len(text) <= MAX_MODEL for text in model.values()):
            raise BadRecord("the name of its model is none")
        options = fields["identity"]["kv_options"].values()
        if not all(value is None or type(value) in (int, str) for value in options):
            raise BadRecord("a KV option in it is not a number or a word")
        signature = fields.pop("signature", None)
        messages = b64decode(fields.get("messages", ""))
        return cls(
            identity=Identity(**fields["identity"]),
            tokens=b64decode(fields["tokens"]),
            blocks=tuple(fields["blocks"]),
            turns=tuple(fields["turns"]),
            agent=fields["agent"],
            metadata=metadata,
            model=model.get("name", ""),
            revision=model.get("revision", ""),
            turn=KeptTurn.from_bundle(messages) if messages else None,
            imported=bool(fields.get("imported", False)),
            records=dict(fields.get("records", {})),
            signature=None if signature is None else Signature.from_json(signature),
            signed_digest=_signed_digest(fields),
        )

    @property
    def keys(self) -> list[BlockKey]:
        return [BlockKey(bytes.fromhex(key)) for key in self.blocks]

    @property
    def model_text(self) -> str:
        """Which model it needs: its name and revision, if they are known, and its weights."""
        parts = (
            self.model or "a model",
            f"revision {self.revision}" if self.revision else "",
            f"weights {digest(self.identity.weights)}",
        )
        return ", ".join(filter(None, parts))


def _signed_digest(fields: Mapping[str, Any]) -> bytes:
    return bytes.fromhex(digest(fields, 64))


def model_alone(identity: Identity) -> Identity:
    """The same model without the tenant that its blocks belong to, or the import they came with.

    The rest of the salt stays: from which token on rows are quantised.
    """
    return replace(identity, salt=identity.salt.removeprefix(tenant_of(identity.salt)), origin="")


def for_others(manifest: Manifest) -> Manifest:
    """As a bundle has it: without the tenant, which an agent's id in a shared store starts with.

    Which import the blocks came with is nobody's business, that they came with one is. Of a model's
    directory only the last part is told.
    """
    identity, tenant = manifest.identity, tenant_of(manifest.identity.salt)
    path = Path(manifest.model)
    return replace(
        manifest,
        identity=model_alone(identity),
        agent=manifest.agent.removeprefix(f"{tenant}.") if tenant else manifest.agent,
        model=path.name if path.is_absolute() else manifest.model,
        imported=manifest.imported or bool(identity.origin),
    )


def refuse_other_model(manifest: Manifest, ours: Identity) -> None:
    """Raise, naming the differences, if blocks of one model cannot serve the other."""
    theirs, wanted = asdict(model_alone(manifest.identity)), asdict(model_alone(ours))
    different = [name for name, value in theirs.items() if value != wanted[name]]
    if different:
        names = ("quantized_kv_start" if name == "salt" else name for name in different)
        raise BadCacheFile(
            f"The bundle is of another model: {', '.join(names)} differ; "
            f"load the model it was made with ({manifest.model_text})."
        )


class BundleSource(NamedTuple):
    """A bundle to be read once, from its first byte to its last."""

    name: str  # for error messages
    file: BinaryIO
    n_bytes: int  # at most


class BundleExport(NamedTuple):
    """A bundle that is made while it is read: nothing of it is in a file."""

    n_records: int
    pieces: Iterator[bytes | memoryview]


def export_bundle(
    disk: DiskTier,
    manifest: Manifest,
    progress: Progress = no_progress,
    key: SigningKey | None = None,
) -> BundleExport:
    """The blocks of a prefix as one file. The last block is cut to the tokens of the prefix.

    To be signed, all records are read once more, before the first byte.
    """
    inside, tokens = _stored_namespace(disk, manifest.identity), manifest.tokens
    manifest = for_others(manifest)
    outside = namespace(manifest.identity)
    held = prefix_blocks(disk, inside, tokens, manifest.keys)
    headers = list(prefix_records(disk, held, tokens, tensors=()))
    if not _is_whole(inside, tokens, {record.header.key for record in headers}):
        raise BadCacheFile(NOT_WHOLE)
    renames = renamed(headers, inside, outside)
    blocks = tuple(dict.fromkeys(record.header.key.hex() for record in renames))

    def records() -> Iterator[_EncodedRecord]:
        for record in renamed(prefix_records(disk, held, tokens), inside, outside):
            name = record_name(record.header.key, record.header.part)
            yield _EncodedRecord(name, encode_record(record))

    digests = {one.name: one.sha256() for one in records()} if key is not None else {}
    manifest = replace(manifest, blocks=blocks, records=digests)
    entries = _entries(manifest.to_json(key), digests, records(), len(headers), progress)
    return BundleExport(len(headers), write_archive(entries))


class _EncodedRecord(NamedTuple):
    name: str
    buffers: list[bytes | memoryview]

    def sha256(self) -> str:
        made = hashlib.sha256()
        for buffer in self.buffers:
            made.update(buffer)
        return made.hexdigest()


def _entries(
    manifest: bytes,
    signed: Mapping[str, str],
    records: Iterator[_EncodedRecord],
    n_records: int,
    progress: Progress,
) -> Iterator[_EncodedRecord]:
    yield _EncodedRecord(MANIFEST, [manifest])
    n_done = 0
    for n_done, record in enumerate(records, 1):
        if signed and signed.get(record.name) != record.sha256():
            raise BadCacheFile("The agent changed while it was exported; export it again.")
        yield record
        progress(n_done, n_records)
    if n_done < n_records:
        raise BadCacheFile("A block was evicted or deleted meanwhile; export it again.")


def accept_any(record: Record | RecordView) -> None:
    """Where no model is loaded that could tell whether a record fits."""


def import_bundle(
    disk: DiskTier,
    wear: WriteBudget,
    source: BundleSource,
    expected: Identity,
    *,
    check_manifest: Callable[[Manifest], None],
    keys: BundleKeys = NO_KEYS,
    check_record: CheckRecord = accept_any,
    progress: Progress = no_progress,
) -> ImportedBundle:
    """Save a bundle's records; none can be found before all are verified and of the right model.

    They get the namespace of `expected`, whichever tenant exported them. Digests prove that bytes
    are whole, not who computed them: unless one of `keys` signed them, they get an origin of their
    own, so that no other look-up reaches them, and all that is computed on top has that origin too.
    `check_manifest` raises for one that is not wanted, `check_record` for a record that does not
    fit the model. Raises InsufficientResources where there is no room for all of them, or today's
    write budget is used up.
    """
    with _as_bundle_errors(source.name), StagedRecords(disk) as staged:
        archive = ArchiveReader(source.file, source.n_bytes)
        entries = iter(archive)
        manifest = _read_manifest(entries)
        check_manifest(manifest)
        refuse_other_model(manifest, expected)
        if not _is_trusted(manifest, keys):
            expected = replace(expected, origin=secrets.token_hex(16))
        theirs, ours = namespace(manifest.identity), _stored_namespace(disk, expected)
        checked = CheckedRecords(manifest, _records_in(entries, manifest, check_record))
        for record in renamed(checked, theirs, ours):
            stage_record(disk, wear, staged, record)
            progress(archive.offset, source.n_bytes)
        checked.check_whole()
        with as_store_errors(disk, "save the bundle"):
            staged.publish()
    return ImportedBundle(manifest, expected)


class ImportedBundle(NamedTuple):
    manifest: Manifest
    identity: Identity  # of its blocks


def _is_trusted(manifest: Manifest, keys: BundleKeys) -> bool:
    """Whether a trusted key signed it, and whoever has that key computed it."""
    is_trusted = keys.trust(manifest.signature, manifest.signed_digest) and not manifest.imported
    if keys.required and not is_trusted:
        raise BadCacheFile(
            "The bundle was not imported: it was not computed and signed by the owner of that key; "
            "import it without the key to use it for its own agent only."
        )
    return is_trusted


def manifest_in(path: Path) -> Manifest:
    """What a bundle says of itself: its model and KV options; nothing in it is verified."""
    with _as_bundle_errors(str(path)), path.open("rb") as file:
        return for_others(_read_manifest(iter(ArchiveReader(file, path.stat().st_size))))


@contextmanager
def _as_bundle_errors(name: str) -> Iterator[None]:
    """Raise every error about the file as a `BadCacheFile`."""
    try:
        yield
    except NewerFormat as error:
        raise BadCacheFile(f"{name} was made by a newer Keepwarm; update this one.") from error
    except (CacheMismatch, CorruptBlock) as error:
        raise BadCacheFile(
            f"{name} does not fit the model ({str(error).rstrip('.')}); export it again."
        ) from error
    except (*PARSE_ERRORS, BadRecord) as error:
        raise BadCacheFile(
            f"{name} is not a complete bundle ({error}); export it again."
        ) from error
    except OSError as error:
        raise BadCacheFile(
            f"{name} cannot be read ({error.strerror or error}); check it."
        ) from error


class CheckedRecords:
    """The records of a bundle, each compared with its manifest."""

    def __init__(self, manifest: Manifest, records: Iterator[Record]) -> None:
        name = namespace(manifest.identity)
        self._manifest = manifest
        self._records = renamed(records, name, name)
        self._found: set[BlockKey] = set()
        self._n_records = 0

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            start = 4 * BLOCK_TOKENS * record.header.number
            tokens = record.header.tokens
            if self._manifest.tokens[start : start + len(tokens)] != tokens:
                raise BadRecord("its blocks do not match its tokens")
            self._found.add(record.header.key)
            self._n_records += 1
            yield record

    def check_whole(self) -> None:
        """Raise unless exactly the blocks of the manifest were found."""
        manifest, found = self._manifest, self._found
        if found != set(manifest.keys):
            raise BadRecord(f"{len(manifest.blocks)} blocks are listed, {len(found)} are inside")
        if not _is_whole(namespace(manifest.identity), manifest.tokens, found):
            raise BadRecord("its blocks do not match its tokens")
        if manifest.signature is not None and self._n_records != len(manifest.records):
            raise BadRecord("it does not have all the records that were signed")


def stage_record(disk: DiskTier, wear: WriteBudget, staged: StagedRecords, record: Record) -> None:
    with as_store_errors(disk, "save the bundle"):
        if not wear.take(record.n_bytes):
            raise InsufficientResources(
                "The bundle was not imported: it exceeds what is left of today's writes; "
                "raise disk_writes_per_day, or import it tomorrow."
            )
        if not staged.add(record):
            wear.give_back(record.n_bytes)
            raise InsufficientResources(
                "The bundle was not imported: there is no room for all of it; "
                "raise disk_bytes or free some of the disk, then import it again."
            )


def _is_whole(name: Namespace, tokens: bytes, found: Collection[BlockKey]) -> bool:
    return all(ref.key in found for ref in chain(name, unpack(tokens)))


def _stored_namespace(disk: DiskTier, identity: Identity) -> Namespace:
    return stored_namespace(disk.cipher, namespace(identity))


def _read_manifest(entries: Iterator[ArchiveEntry]) -> Manifest:
    first = next(entries, None)
    if first is None or first.name != MANIFEST or first.n_bytes > MAX_MANIFEST_BYTES:
        raise BadCacheFile("The file does not begin with a manifest; it is not a bundle.")
    text = first.read()
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_MANIFEST_ITEMS:
        raise BadRecord(f"its manifest has more than {MAX_MANIFEST_ITEMS} items")
    return Manifest.from_json(text)


def _records_in(
    entries: Iterator[ArchiveEntry], manifest: Manifest, check_record: CheckRecord
) -> Iterator[Record]:
    """Every record, checked by its header before its tensors take memory."""
    for entry in entries:
        name = parse_name(entry.name)
        if name is None:
            raise BadRecord(f"{entry.name} is not a record")
        file = cast("BinaryIO", entry)
        opened = open_record(file, entry.n_bytes)
        check_identity(opened.header, name.key, name.part)
        check_codec(opened.header, manifest.identity.kv_options.get("at_rest"))
        check_record(view_record(file, opened, ReadBuffer()))
        record = read_record(file, opened)
        if manifest.signature is not None and manifest.records.get(entry.name) != entry.sha256():
            raise BadRecord(f"{entry.name} is not what was signed")
        yield record


def write_archive(
    entries: Iterable[tuple[str, Sequence[bytes | memoryview]]],
) -> Iterator[bytes | memoryview]:
    """A small part of the tar format, piece by piece: plain files under short names."""
    total = 0
    for name, buffers in entries:
        n_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        yield _header(name, n_bytes)
        yield from buffers
        yield bytes(-n_bytes % BLOCKSIZE)
        total += BLOCKSIZE + n_bytes + -n_bytes % BLOCKSIZE
    yield bytes(2 * BLOCKSIZE)
    yield bytes(-(total + 2 * BLOCKSIZE) % RECORDSIZE)


class ArchiveReader:
    """The entries of an archive of so many bytes, in order.

    Each is read to its end before the next is asked for; the file need not be seekable. Raises
    BadRecord for all that `write_archive` does not write.
    """

    def __init__(self, file: BinaryIO, n_bytes: int) -> None:
        self.offset = 0  # bytes read so far
        self._file = file
        self._n_bytes = n_bytes
        self._names: set[str] = set()

    def __iter__(self) -> Iterator[ArchiveEntry]:
        while any(block := self._read(BLOCKSIZE)):
            entry = self._entry(block)
            yield entry
            if not entry.is_at_end():
                raise BadRecord(f"{entry.name} is longer than its content")
            if any(self._read(-entry.n_bytes % BLOCKSIZE)):
                raise BadRecord(f"there is data after {entry.name}")
        self._check_end()

    def readinto(self, data: memoryview) -> int:
        n_read = self._file.readinto(data)  # type: ignore[attr-defined]
        self.offset += n_read
        return int(n_read)

    def _entry(self, block: bytes) -> ArchiveEntry:
        known, length = NAME.fullmatch(block[:100]), SIZE.fullmatch(block[124:136])
        name, n_bytes = (known[1].decode(), int(length[1], 8)) if known and length else ("", 0)
        if not name or block != _header(name, n_bytes):
            raise BadRecord("it has an entry that does not belong in a bundle, or was damaged")
        if name in self._names:
            raise BadRecord(f"{name} is in it twice")
        self._names.add(name)
        if n_bytes > self._n_bytes - self.offset:
            raise BadRecord("it is cut short")
        return ArchiveEntry(self, name, n_bytes)

    def _check_end(self) -> None:
        """One more block of zeros, and as many as fill the last unit; nothing behind them."""
        n_left = BLOCKSIZE + -(self.offset + BLOCKSIZE) % RECORDSIZE
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
    """The only header that a bundle has for such an entry."""
    info = TarInfo(name)
    info.size, info.mode = n_bytes, 0o600
    return info.tobuf(USTAR_FORMAT)

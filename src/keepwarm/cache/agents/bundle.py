"""An agent, or any prefix, as one file that can be moved to another machine.

A tar archive: `manifest.json` first (identity of the model, token ids, blocks), then the records as
a plain store without tenants has them, so that no key is needed to read it. An import verifies
everything and gives the blocks the importer's namespace. A bundle for other weights or another KV
dtype is refused with the reason.
"""

from __future__ import annotations

import io
import json
import math
import tarfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from keepwarm.errors import BadCacheFile, BadRecord, InsufficientResources, NewerFormat
from keepwarm.files import replacing
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, chain, root, unpack
from keepwarm.prefix.fingerprint import Identity, digest, namespace, tenant_of
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.upkeep import Progress, no_progress
from keepwarm.store.disk.wear import Wear
from keepwarm.store.record import (
    ITEM_BYTES,
    Header,
    Part,
    Record,
    Tensor,
    check_identity,
    encode_record,
    open_record,
    read_tensors,
)
from keepwarm.store.seal import stored_namespace
from keepwarm.store.tier import as_store_errors

VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
# Exceptions that reading a file that is not a bundle, or a hostile one, may raise.
PARSE_ERRORS = (
    tarfile.TarError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
    MemoryError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    identity: Identity
    tokens: bytes
    blocks: tuple[str, ...]  # keys of the blocks inside, in hex
    turns: tuple[int, ...] = ()
    agent: str = ""

    def to_json(self) -> bytes:
        fields = asdict(self) | {"version": VERSION, "tokens": b64encode(self.tokens).decode()}
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
        if not isinstance(fields["agent"], str):
            raise BadRecord("its agent id is not text")
        options = fields["identity"]["kv_options"].values()
        if not all(value is None or type(value) is int for value in options):
            raise BadRecord("a KV option in it is not a number")
        return cls(
            identity=Identity(**fields["identity"]),
            tokens=b64decode(fields["tokens"]),
            blocks=tuple(fields["blocks"]),
            turns=tuple(fields["turns"]),
            agent=fields["agent"],
        )

    @property
    def keys(self) -> list[BlockKey]:
        return [BlockKey(bytes.fromhex(key)) for key in self.blocks]


class _ExportedBlock(NamedTuple):
    """A block on disk that is exported, and its position in the chain."""

    key: BlockKey
    number: int


def export_bundle(
    disk: DiskTier, path: Path, manifest: Manifest, progress: Progress = no_progress
) -> int:
    """Write the blocks of a prefix to one file; the number of records.

    The last block is cut to the tokens of the prefix. Checkpoints inside blocks are included,
    because a model with state layers can continue only from them.
    """
    inside, tokens = _stored_namespace(disk, manifest.identity), manifest.tokens
    manifest = _manifest_without_tenant(manifest)
    outside = namespace(manifest.identity)
    held = [_ExportedBlock(key, number) for number, key in enumerate(manifest.keys)]
    held += _checkpoints(disk, inside, manifest)
    headers = list(_records(disk, held, tokens, tensors=()))
    if not _is_whole(inside, tokens, {record.header.key for record in headers}):
        raise BadCacheFile("Some blocks are missing or unreadable; nothing was exported.")
    renames = renamed(headers, inside, outside)
    blocks = tuple(dict.fromkeys(record.header.key.hex() for record in renames))
    n_records = 0
    with replacing(path) as temp, tarfile.open(temp, mode="w") as archive:
        _add(archive, "manifest.json", [replace(manifest, blocks=blocks).to_json()])
        for record in renamed(_records(disk, held, tokens), inside, outside):
            name = f"{record.header.key.hex()}.{record.header.part.value}.safetensors"
            _add(archive, name, encode_record(record))
            n_records += 1
            progress(n_records, len(headers))
    return n_records


def import_bundle(
    disk: DiskTier, wear: Wear, path: Path, expected: Identity, progress: Progress = no_progress
) -> Manifest:
    """Save a bundle's records, once all of them are verified and of the right model.

    Raises InsufficientResources where it does not all fit, or today's write budget is used up.
    """
    with _as_bundle_errors(path):
        half = path.stat().st_size  # it is read twice
        checked = _check(path, expected, lambda done: progress(done, 2 * half))
        if not wear.allows(checked.n_bytes):
            raise _over_budget(checked.n_bytes)
        theirs, ours = namespace(checked.manifest.identity), _stored_namespace(disk, expected)
        headers = []
        with tarfile.open(path, "r:") as archive:
            _read_manifest(archive)
            for record in renamed(_records_in(archive), theirs, ours):
                _save(disk, wear, record)
                headers.append(record.header)
                progress(half + archive.offset, 2 * half)
    _check_saved(disk, headers)
    return checked.manifest


def identity_in(path: Path) -> Identity:
    """The model and KV options that a bundle names; nothing in it is verified."""
    with _as_bundle_errors(path), tarfile.open(path, "r:") as archive:
        return without_tenant(_read_manifest(archive).identity)


@contextmanager
def _as_bundle_errors(path: Path) -> Iterator[None]:
    """Raise every error about the file as a `BadCacheFile`."""
    try:
        yield
    except NewerFormat as error:
        raise BadCacheFile(f"{path} was made by a newer Keepwarm; update this one.") from error
    except (*PARSE_ERRORS, BadRecord) as error:
        raise BadCacheFile(
            f"{path} is not a complete bundle ({error}); export it again."
        ) from error
    except OSError as error:
        raise BadCacheFile(f"{path} could not be read ({error}).") from error


class _VerifiedBundle(NamedTuple):
    manifest: Manifest
    n_bytes: int


def _check(path: Path, expected: Identity, progress: Callable[[int], None]) -> _VerifiedBundle:
    """Read all of a bundle; raise if it is incomplete or of another model."""
    with tarfile.open(path, "r:") as archive:
        manifest = _read_manifest(archive)
        refuse_other_model(manifest.identity, expected)
        name, found, n_bytes = namespace(manifest.identity), set(), 0
        for record in renamed(_records_in(archive), name, name):
            _check_tokens(manifest, record.header)
            found.add(record.header.key)
            n_bytes += record.n_bytes
            progress(archive.offset)
        _check_whole(manifest, found)
        return _VerifiedBundle(manifest, n_bytes)


def _save(disk: DiskTier, wear: Wear, record: Record) -> None:
    with as_store_errors(disk, "save the bundle"):
        if not wear.take(record.n_bytes):
            raise _over_budget(record.n_bytes)
        put = disk.put(record)
        if not put.stored:
            wear.give_back(record.n_bytes)
        put.durable.result()


def _over_budget(n_bytes: int) -> InsufficientResources:
    return InsufficientResources(
        f"The bundle was not imported: {n_bytes} bytes exceed what is left of today's writes; "
        "raise disk_writes_per_day, or import it tomorrow."
    )


def _check_saved(disk: DiskTier, headers: Sequence[Header]) -> None:
    """Raise if a record is missing: a tier without room drops it and raises no error."""
    known = disk.have([header.key for header in headers])
    lost = [h for h in headers if h.key not in known or h.part not in known[h.key].parts]
    if lost:
        raise InsufficientResources(
            f"The bundle was not imported: {len(lost)} of the {len(headers)} records in it found "
            "no room; raise disk_bytes or free some of the disk, then import it again."
        )


def _check_whole(manifest: Manifest, found: set[BlockKey]) -> None:
    """Raise unless exactly the blocks of the manifest were found."""
    if found != set(manifest.keys):
        raise BadRecord(f"{len(manifest.blocks)} blocks are listed, {len(found)} are inside")
    if not _is_whole(namespace(manifest.identity), manifest.tokens, found):
        raise BadRecord("its blocks do not match its tokens")


def _check_tokens(manifest: Manifest, header: Header) -> None:
    """Raise if a record has tokens that the manifest does not."""
    start = 4 * BLOCK_TOKENS * header.number
    if not manifest.tokens[start:].startswith(header.tokens):
        raise BadRecord("its blocks do not match its tokens")


def _is_whole(name: Namespace, tokens: bytes, found: Collection[BlockKey]) -> bool:
    return all(ref.key in found for ref in chain(name, unpack(tokens)))


def without_tenant(identity: Identity) -> Identity:
    """The same model without the tenant that its blocks belong to.

    The rest of the salt stays: from which token on rows are quantised.
    """
    return replace(identity, salt=identity.salt.removeprefix(tenant_of(identity.salt)))


def _manifest_without_tenant(manifest: Manifest) -> Manifest:
    """Also without the tenant in the agent's id, which starts with it in a shared store."""
    tenant = tenant_of(manifest.identity.salt)
    agent = manifest.agent.removeprefix(f"{tenant}.") if tenant else manifest.agent
    return replace(manifest, identity=without_tenant(manifest.identity), agent=agent)


def refuse_other_model(theirs: Identity, ours: Identity) -> None:
    """Raise, naming the differences, if blocks of one model cannot serve the other."""
    wanted = asdict(without_tenant(ours))
    different = [n for n, value in asdict(without_tenant(theirs)).items() if value != wanted[n]]
    if different:
        names = ("quantized_kv_start" if name == "salt" else name for name in different)
        raise BadCacheFile(
            f"The bundle is of another model: {', '.join(names)} differ; "
            "load the model it was made with."
        )


def renamed(records: Iterable[Record], old: Namespace, new: Namespace) -> Iterator[Record]:
    """The same records under the keys of another namespace; parents come before children.

    Raises for a record of a third namespace, so that no tenant imports blocks into another's.
    """
    parents = {root(old): (root(new), 0)}  # by old parent: new parent, number of its children
    for record in records:
        header = record.header
        parent, number = parents.get(header.parent, (None, 0))
        if parent is None or header.namespace != old or header.number != number:
            raise BadRecord("a block does not follow an earlier one")
        key = block_key(new, parent, header.tokens)
        if len(header.tokens) == 4 * BLOCK_TOKENS:
            parents[header.key] = (key, number + 1)
        yield replace(record, header=replace(header, namespace=new, key=key, parent=parent))


def _stored_namespace(disk: DiskTier, identity: Identity) -> Namespace:
    return stored_namespace(disk.seal, namespace(identity))


def _checkpoints(disk: DiskTier, name: Namespace, manifest: Manifest) -> Iterator[_ExportedBlock]:
    """Checkpoints inside the blocks of a prefix."""
    tokens, keys = manifest.tokens, manifest.keys
    numbers = {parent: number for number, parent in enumerate([root(name), *keys])}
    for state in disk.states(list(numbers)):
        number = numbers[state.parent]
        start, end = number * BLOCK_TOKENS, number * BLOCK_TOKENS + state.n_tokens
        own = tokens[4 * start : 4 * end]
        if state.key not in keys and block_key(name, state.parent, own) == state.key:
            yield _ExportedBlock(state.key, number)


def _records(
    disk: DiskTier,
    held: Sequence[_ExportedBlock],
    tokens: bytes,
    tensors: Collection[str] | None = None,
) -> Iterator[Record]:
    known = disk.have([block.key for block in held])
    for key, number in held:
        if key in known:
            parts = [part for part in Part if part in known[key].parts]
            found = [r for part in parts if (r := disk.read(key, part, tensors)) is not None]
            yield from _first_tokens(found, len(tokens) // 4 - number * BLOCK_TOKENS)


def _first_tokens(records: Sequence[Record], n_tokens: int) -> Iterator[Record]:
    """The parts of one block cut to its first tokens; if none is left, the tokens alone."""
    firsts = [first for r in records if (first := trimmed(r, n_tokens)) is not None]
    yield from firsts or [_only_tokens(record.header, n_tokens) for record in records[:1]]


def _only_tokens(header: Header, n_tokens: int) -> Record:
    """A block without rows is a window record with zero rows."""
    return Record(replace(_shorter(header, n_tokens), part=Part.WINDOW, extra={"w_rows": 0}), ())


def _shorter(header: Header, n_tokens: int) -> Header:
    tokens = header.tokens[: 4 * n_tokens]
    key = block_key(header.namespace, header.parent, tokens)
    return replace(header, key=key, tokens=tokens)


def trimmed(record: Record, n_tokens: int) -> Record | None:
    """A record cut to its first tokens, so that no later token is exported.

    None for a state, which belongs to the last token, and for window rows that begin later.
    """
    header = record.header
    n_held = len(header.tokens) // 4
    if n_held <= n_tokens:
        return record
    w_rows = header.w_rows - (n_held - n_tokens)
    if header.part is Part.STATE or (header.part is Part.WINDOW and w_rows <= 0):
        return None
    extra = dict(header.extra) | ({"w_rows": w_rows} if header.part is Part.WINDOW else {})
    tensors = tuple(_without_last_rows(t, n_held - n_tokens) for t in record.tensors)
    return Record(replace(_shorter(header, n_tokens), extra=extra), tensors)


def _without_last_rows(tensor: Tensor, n_rows: int) -> Tensor:
    """Rows are the second-to-last dimension in K and V of every kind."""
    *outer, rows, inner = tensor.shape if len(tensor.shape) > 1 else (0, 0)
    left = rows - n_rows
    if left <= 0:
        raise BadCacheFile(f"{tensor.name} cannot be cut to fewer rows; export more tokens.")
    row_bytes = inner * ITEM_BYTES[tensor.dtype]
    words = np.frombuffer(tensor.data, np.uint8).reshape(math.prod(outer), rows, row_bytes)
    data = memoryview(words[:, :left].tobytes())
    return tensor._replace(shape=(*outer, left, inner), data=data)


def _add(archive: tarfile.TarFile, name: str, buffers: Sequence[bytes | memoryview]) -> None:
    data = b"".join(buffers)
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    archive.addfile(info, io.BytesIO(data))


def _read_manifest(archive: tarfile.TarFile) -> Manifest:
    first = archive.next()
    if first is None or first.name != "manifest.json" or first.size > MAX_MANIFEST_BYTES:
        raise BadCacheFile("The file does not begin with a manifest; it is not a bundle.")
    return Manifest.from_json(_open(archive, first).read())


def _records_in(archive: tarfile.TarFile) -> Iterator[Record]:
    while (member := archive.next()) is not None:
        file = _open(archive, member)
        opened = open_record(file, member.size)
        check_identity(opened.header, opened.header.key, opened.header.part)
        yield Record(opened.header, read_tensors(file, opened))


def _open(archive: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    file = archive.extractfile(member)
    if file is None or member.issparse():
        raise BadCacheFile(f"{member.name} in the bundle is not a file.")
    return file  # type: ignore[return-value]

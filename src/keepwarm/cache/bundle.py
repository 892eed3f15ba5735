"""An agent, or any prefix, as one file that can be carried to another machine.

A tar archive: `manifest.json` first (identity of the model, token ids, blocks), then the records as
they lie in a store that is not encrypted: a bundle is to be read where the key is not. Everything
is verified on the way in, and a bundle for other weights or another KV dtype is refused with the
reason.
"""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from keepwarm.errors import BadCacheFile, BadRecord, NewerFormat
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, block_key, root
from keepwarm.prefix.fingerprint import Identity, digest, namespace
from keepwarm.store.atomic import FILE_MODE
from keepwarm.store.disk import DiskTier
from keepwarm.store.record import (
    ITEM_BYTES,
    Part,
    Record,
    Tensor,
    check_identity,
    open_record,
    pieces,
    read_tensors,
)
from keepwarm.store.seal import stored_namespace
from keepwarm.store.upkeep import Progress, quietly

VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    identity: Identity
    tokens: bytes
    blocks: tuple[str, ...]  # keys, in hex, of what is inside
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


def export_bundle(
    disk: DiskTier, path: Path, manifest: Manifest, progress: Progress = quietly
) -> int:
    """Write the blocks of a prefix into one file; answers with the number of records.

    Of the last block no more goes along than the tokens of the prefix.
    """
    temp = path.with_name(f"{path.name}.part")
    inside, outside = _namespaces(disk, manifest)
    headers = list(_records(disk, manifest, tensors=()))
    if {record.header.number for record in headers} != set(range(len(manifest.blocks))):
        raise BadCacheFile("Some of the blocks cannot be read any more; nothing was exported.")
    renames = renamed(headers, inside, outside)
    blocks = tuple(dict.fromkeys(record.header.key.hex() for record in renames))
    n_records = 0
    with _private(temp) as file, tarfile.open(fileobj=file, mode="w") as archive:
        _add(archive, "manifest.json", [replace(manifest, blocks=blocks).to_json()])
        for record in renamed(_records(disk, manifest), inside, outside):
            name = f"{record.header.key.hex()}.{record.header.part.value}.safetensors"
            _add(archive, name, pieces(record))
            n_records += 1
            progress(n_records, len(headers))
    temp.replace(path)
    return n_records


def import_bundle(
    disk: DiskTier, path: Path, expected: Identity, progress: Progress = quietly
) -> Manifest:
    """Put a bundle's records into a store, once all of it is verified and of the right model."""
    try:
        total = 2 * path.stat().st_size  # it is read twice
        with tarfile.open(path) as archive:
            manifest = _read_manifest(archive)
            refuse_other_model(manifest.identity, expected)
            found = set()
            for record in _records_in(archive):
                found.add(record.header.key)
                progress(archive.offset, total)
            _check_whole(manifest, found)
        with tarfile.open(path) as archive:
            inside, outside = _namespaces(disk, _read_manifest(archive))
            for record in renamed(_records_in(archive), outside, inside):
                disk.put(record).durable.result()
                progress(total // 2 + archive.offset, total)
            return manifest
    except NewerFormat as error:
        raise BadCacheFile(f"{path} was made by a newer Keepwarm; update this one.") from error
    except (tarfile.TarError, BadRecord, ValueError, KeyError, TypeError) as error:
        raise BadCacheFile(f"{path} is not a whole bundle ({error}); export it again.") from error
    except OSError as error:
        raise BadCacheFile(f"{path} could not be read and kept ({error}).") from error


def _check_whole(manifest: Manifest, found: set[BlockKey]) -> None:
    """Every block is there and no other is."""
    if found != set(manifest.keys):
        raise BadRecord(f"{len(manifest.blocks)} blocks are listed, {len(found)} are inside")


def refuse_other_model(theirs: Identity, ours: Identity) -> None:
    """Raise, saying what differs, where blocks of one model cannot serve the other."""
    different = [name for name, value in asdict(theirs).items() if value != asdict(ours)[name]]
    if different:
        raise BadCacheFile(
            f"The bundle is of another model: {', '.join(different)} differ; "
            "load the model it was made with."
        )


def renamed(records: Iterable[Record], old: Namespace, new: Namespace) -> Iterator[Record]:
    """The same records under the keys of another namespace; every parent comes before its child."""
    if old == new:
        yield from records
        return
    keys = {root(old): root(new)}
    for record in records:
        header = record.header
        parent = keys.get(header.parent)
        if parent is None:
            raise BadRecord("a block comes before the one it follows")
        keys[header.key] = block_key(new, parent, header.tokens)
        moved = replace(header, namespace=new, key=keys[header.key], parent=parent)
        yield replace(record, header=moved)


def _namespaces(disk: DiskTier, manifest: Manifest) -> tuple[Namespace, Namespace]:
    """Of the store and of the bundle; they differ where the store is sealed."""
    outside = namespace(manifest.identity)
    return stored_namespace(disk.seal, outside), outside


def _private(path: Path) -> BinaryIO:
    """A new file that nobody else may read."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb")


def _records(
    disk: DiskTier, manifest: Manifest, tensors: Collection[str] | None = None
) -> Iterator[Record]:
    keys, n_tokens = manifest.keys, len(manifest.tokens) // 4
    known = disk.have(keys)
    for number, key in enumerate(keys):
        for part in Part:
            if key in known and part in known[key].parts:
                record = disk.read(key, part, tensors)
                first = record and trimmed(record, n_tokens - number * BLOCK_TOKENS)
                if first:
                    yield first


def trimmed(record: Record, n_tokens: int) -> Record | None:
    """The first tokens of a record as one of its own, so that no later token goes along.

    A state stands behind its last token, so nothing is left of it, nor of window rows that begin
    later.
    """
    header = record.header
    n_held = len(header.tokens) // 4
    if n_held <= n_tokens:
        return record
    w_rows = header.w_rows - (n_held - n_tokens)
    if header.part is Part.STATE or (header.part is Part.WINDOW and w_rows <= 0):
        return None
    tokens = header.tokens[: 4 * n_tokens]
    extra = dict(header.extra) | ({"w_rows": w_rows} if header.part is Part.WINDOW else {})
    key = block_key(header.namespace, header.parent, tokens)
    tensors = tuple(_without_last_rows(t, n_held - n_tokens) for t in record.tensors)
    return Record(replace(header, key=key, tokens=tokens, extra=extra), tensors)


def _without_last_rows(tensor: Tensor, n_rows: int) -> Tensor:
    """Rows are the last dimension but one, in K and V of every kind."""
    *outer, rows, inner = tensor.shape if len(tensor.shape) > 1 else (0, 0)
    left = rows - n_rows
    if left <= 0:
        raise BadCacheFile(f"{tensor.name} has no rows that could be cut; export more tokens.")
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
        raise BadCacheFile("The file does not begin with a manifest; it is no bundle.")
    return Manifest.from_json(_open(archive, first).read())


def _records_in(archive: tarfile.TarFile) -> Iterator[Record]:
    while (member := archive.next()) is not None:
        file = _open(archive, member)
        opened = open_record(file, member.size)
        check_identity(opened.header, opened.header.key, opened.header.part)
        yield Record(opened.header, read_tensors(file, opened))


def _open(archive: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    file = archive.extractfile(member)
    if file is None:
        raise BadCacheFile(f"{member.name} in the bundle is not a file.")
    return file  # type: ignore[return-value]

"""An agent, or any prefix, as one file that can be moved to another machine.

A tar archive: `manifest.json` first (identity of the model, token ids, blocks), then the records as
a plain store without tenants has them, so that no key is needed to read it. An import verifies
everything and gives the blocks the importer's namespace. A bundle for other weights or another KV
dtype is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, cast

from keepwarm.cache.agents.archive import MANIFEST, ArchiveEntry, ArchiveReader, ArchiveWriter
from keepwarm.cache.agents.manifest import (
    Manifest,
    for_others,
    model_alone,
    refuse_other_model,
)
from keepwarm.cache.agents.rewriting import prefix_blocks, prefix_records, renamed
from keepwarm.errors import (
    BadCacheFile,
    BadRecord,
    CacheMismatch,
    CorruptBlock,
    InsufficientResources,
    NewerFormat,
)
from keepwarm.files import replacing
from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain, unpack
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.store.disk.disk import DiskTier
from keepwarm.store.disk.upkeep import Progress, no_progress
from keepwarm.store.disk.wear import Wear
from keepwarm.store.names import parse_name, record_name
from keepwarm.store.record import (
    Header,
    Record,
    check_identity,
    encode_record,
    open_record,
    read_record,
)
from keepwarm.store.seal import stored_namespace
from keepwarm.store.tier import as_store_errors

CheckRecord: TypeAlias = Callable[[Record], None]
MAX_MANIFEST_BYTES = 64 << 20
# Exceptions that reading a file that is not a bundle, or a hostile one, may raise.
PARSE_ERRORS = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError, OverflowError,
)  # fmt: skip


def export_bundle(
    disk: DiskTier, path: Path, manifest: Manifest, progress: Progress = no_progress
) -> int:
    """Write the blocks of a prefix to one file; the number of records.

    The last block is cut to the tokens of the prefix.
    """
    inside, tokens = _stored_namespace(disk, manifest.identity), manifest.tokens
    manifest = for_others(manifest)
    outside = namespace(manifest.identity)
    held = prefix_blocks(disk, inside, tokens, manifest.keys)
    headers = list(prefix_records(disk, held, tokens, tensors=()))
    if not _is_whole(inside, tokens, {record.header.key for record in headers}):
        raise BadCacheFile("Some blocks are missing or unreadable; nothing was exported.")
    renames = renamed(headers, inside, outside)
    blocks = tuple(dict.fromkeys(record.header.key.hex() for record in renames))
    n_records = 0
    with replacing(path) as temp, temp.open("wb") as file:
        archive = ArchiveWriter(file)
        archive.add(MANIFEST, [replace(manifest, blocks=blocks).to_json()])
        for record in renamed(prefix_records(disk, held, tokens), inside, outside):
            archive.add(record_name(record.header.key, record.header.part), encode_record(record))
            n_records += 1
            progress(n_records, len(headers))
        archive.close()
    return n_records


def accept_any(record: Record) -> None:
    """Where no model is loaded that could tell whether a record fits."""


def import_bundle(
    disk: DiskTier,
    wear: Wear,
    path: Path,
    expected: Identity,
    *,
    check_record: CheckRecord = accept_any,
    progress: Progress = no_progress,
) -> Manifest:
    """Save a bundle's records, once all of them are verified and of the right model.

    `check_record` raises for a record that does not fit the model. Raises InsufficientResources
    where there is no room for all of them, or today's write budget is used up.
    """
    with _as_bundle_errors(path):
        half = path.stat().st_size  # it is read twice
        checked = _check(path, expected, check_record, lambda done: progress(done, 2 * half))
        if not wear.allows(checked.n_bytes):
            raise _over_budget(checked.n_bytes)
        theirs, ours = namespace(checked.manifest.identity), _stored_namespace(disk, expected)
        headers: list[Header] = []
        with _all_or_nothing(disk, headers), path.open("rb") as file:
            archive = ArchiveReader(file, half)
            entries = iter(archive)
            _read_manifest(entries)
            for record in renamed(_records_in(entries), theirs, ours):
                headers.append(record.header)
                _save(disk, wear, record)
                progress(half + archive.offset, 2 * half)
            _check_saved(disk, headers)
    return checked.manifest


@contextmanager
def _all_or_nothing(disk: DiskTier, headers: Sequence[Header]) -> Iterator[None]:
    """Delete the records of an import that fails: no agent would ever reach them."""
    try:
        yield
    except BaseException:
        disk.delete_all([header.key for header in headers])
        raise


def identity_in(path: Path) -> Identity:
    """The model and KV options that a bundle names; nothing in it is verified."""
    with _as_bundle_errors(path), path.open("rb") as file:
        entries = iter(ArchiveReader(file, path.stat().st_size))
        return model_alone(_read_manifest(entries).identity)


@contextmanager
def _as_bundle_errors(path: Path) -> Iterator[None]:
    """Raise every error about the file as a `BadCacheFile`."""
    try:
        yield
    except NewerFormat as error:
        raise BadCacheFile(f"{path} was made by a newer Keepwarm; update this one.") from error
    except (CacheMismatch, CorruptBlock) as error:
        raise BadCacheFile(
            f"{path} does not fit the model ({str(error).rstrip('.')}); export it again."
        ) from error
    except (*PARSE_ERRORS, BadRecord) as error:
        raise BadCacheFile(
            f"{path} is not a complete bundle ({error}); export it again."
        ) from error
    except OSError as error:
        raise BadCacheFile(f"{path} could not be read ({error}).") from error


class _VerifiedBundle(NamedTuple):
    manifest: Manifest
    n_bytes: int


def _check(
    path: Path, expected: Identity, check_record: CheckRecord, progress: Callable[[int], None]
) -> _VerifiedBundle:
    """Read all of a bundle; raise if it is incomplete or of another model."""
    with path.open("rb") as file:
        archive = ArchiveReader(file, path.stat().st_size)
        entries = iter(archive)
        manifest = _read_manifest(entries)
        refuse_other_model(manifest.identity, expected)
        name, found, n_bytes = namespace(manifest.identity), set(), 0
        for record in renamed(_records_in(entries), name, name):
            _check_tokens(manifest, record.header)
            check_record(record)
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


def _stored_namespace(disk: DiskTier, identity: Identity) -> Namespace:
    return stored_namespace(disk.seal, namespace(identity))


def _read_manifest(entries: Iterator[ArchiveEntry]) -> Manifest:
    first = next(entries, None)
    if first is None or first.name != MANIFEST or first.n_bytes > MAX_MANIFEST_BYTES:
        raise BadCacheFile("The file does not begin with a manifest; it is not a bundle.")
    return Manifest.from_json(first.read())


def _records_in(entries: Iterator[ArchiveEntry]) -> Iterator[Record]:
    for entry in entries:
        name = parse_name(entry.name)
        if name is None:
            raise BadRecord(f"{entry.name} is not a record")
        file = cast("BinaryIO", entry)
        opened = open_record(file, entry.n_bytes)
        check_identity(opened.header, name.key, name.part)
        yield read_record(file, opened)

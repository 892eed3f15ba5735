"""Deleting blocks from a shared place by their keys, in every class.

A block of tokens also lies there as the beginning of a longer one, or as shorter copies of itself.
These are among the records that follow the same block, so that each such folder is listed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.prefix.blocks import BlockKey, Namespace, block_key
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part
from keepwarm.remote.backend import Backend, Listed
from keepwarm.remote.handshake import STORE_META
from keepwarm.remote.known import KnownRecord
from keepwarm.remote.names import MAC, RecordPlace, RemoteNames, list_classes, parse_last
from keepwarm.remote.question import read_header
from keepwarm.store.tier import NamedBlock

CALL_S = 10.0  # nobody waits for it
AT_ONCE = 256  # names deleted in one call


def erase_blocks(
    backend: Backend,
    cipher: Cipher | None,
    namespaces: Iterable[Namespace],
    blocks: Iterable[NamedBlock],
    keep: Collection[BlockKey],
) -> None:
    """Delete blocks, whichever of the namespaces they are in, with longer and shorter copies, but
    none in `keep`. Raises CallError.
    """
    if backend.sizes([STORE_META], CALL_S) == [None]:  # a share that is not mounted looks empty
        raise CallError("it has no mark")
    by_parent: defaultdict[BlockKey, list[NamedBlock]] = defaultdict(list)
    for block in blocks:
        if block.key not in keep:
            by_parent[block.parent].append(block)
    namespaces = list(namespaces)
    for numerics in list_classes(backend, CALL_S):
        for namespace in namespaces:
            for parent, doomed in by_parent.items():
                folder = _Folder(backend, cipher, numerics, namespace, parent)
                folder.erase(doomed, keep)


class _Folder:
    """The records that follow one block."""

    def __init__(
        self,
        backend: Backend,
        cipher: Cipher | None,
        numerics: str,
        namespace: Namespace,
        parent: BlockKey,
    ) -> None:
        self._backend, self._seal = backend, cipher
        self._names = RemoteNames(numerics)
        self._namespace, self._parent = namespace, parent

    def erase(self, blocks: Sequence[NamedBlock], keep: Collection[BlockKey]) -> None:
        listed = self._listed()
        tokens = {key: self._tokens_of(key, blobs) for key, blobs in listed.items()}
        doomed = set(self._doomed(tokens, blocks)) - set(keep)
        blobs = [blob for key in doomed & listed.keys() for blob in listed[key]]
        if self._backend.in_batches:  # the list of a folder may have been evicted before its names
            blobs += [Listed(name) for block in blocks for name in self._names_of(block.key)]
        for start in range(0, len(blobs), AT_ONCE):
            self._backend.delete(blobs[start : start + AT_ONCE], CALL_S)

    def _listed(self) -> dict[BlockKey, list[Listed]]:
        """Records and their MACs, by block."""
        found: defaultdict[BlockKey, list[Listed]] = defaultdict(list)
        folder = self._names.folder(self._namespace, self._parent)
        for blob in self._backend.list_names(folder, CALL_S, None):
            if (parsed := parse_last(blob.name.removesuffix(MAC))) is not None:
                found[parsed[0]].append(blob)
        return dict(found)

    def _doomed(
        self, tokens: Mapping[BlockKey, bytes], blocks: Sequence[NamedBlock]
    ) -> Iterator[BlockKey]:
        """The blocks, those that begin with an open one, and their own beginnings."""
        keys = {block.key for block in blocks}
        yield from keys
        own = [tokens[key] for key in keys & tokens.keys()]
        lengths = {block.n_tokens for block in blocks if block.is_open}
        for key, theirs in tokens.items():
            starts = (theirs[: 4 * n] for n in lengths if 4 * n <= len(theirs))
            is_longer = any(self._key(start) in keys for start in starts)
            if theirs and (is_longer or any(one.startswith(theirs) for one in own)):
                yield key

    def _key(self, tokens: bytes) -> BlockKey:
        return block_key(self._namespace, self._parent, tokens)

    def _tokens_of(self, key: BlockKey, blobs: Sequence[Listed]) -> bytes:
        """As the place lists them, or as a record says; empty if neither does."""
        for blob in blobs:
            if blob.order and self._key(blob.order) == key:
                return blob.order
        for blob in blobs:
            if (parsed := parse_last(blob.name)) is not None:
                place = RecordPlace(self._namespace, self._parent, *parsed)
                record = KnownRecord(place, b"", self._size_of(blob))
                deadline = CallDeadline(CALL_S)
                opened = read_header(self._backend, self._seal, blob.name, record, deadline)
                if opened is not None:
                    return opened.header.tokens
        return b""

    def _size_of(self, blob: Listed) -> int:
        """A list that is kept beside the blobs may be older than they are."""
        if not self._backend.in_batches:
            return blob.n_bytes
        return self._backend.sizes([blob.name], CALL_S)[0] or 0

    def _names_of(self, key: BlockKey) -> Iterator[str]:
        for part in Part:
            name = self._names.of(RecordPlace(self._namespace, self._parent, key, part))
            yield from (name, name + MAC)

"""Deletes from remote stores what was deleted here, now or when they can be reached.

Blocks are deleted by their keys, in every compute class. A block of tokens also lies there as the
beginning of a longer one, or as shorter copies of itself. These are among the records that follow
the same block, so that each such folder is listed.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import chain
from typing import TypeAlias

from keepwarm.concurrency import CallDeadline, CallError
from keepwarm.prefix.blocks import BlockKey, Namespace, block_key
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import Backend, Listed
from keepwarm.remote.handshake import STORE_META
from keepwarm.remote.records import RemoteNames, RemoteRecord, list_classes, parse_last, read_header
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.disk.tombstones import Tombstone, Tombstones
from keepwarm.store.tier import NamedBlock

LOG = logging.getLogger(__name__)
CALL_S = 10.0  # nobody waits for it
AT_ONCE = 256  # names deleted in one call
CLOSE_S = 1.0  # that a closing store waits for a deletion
RETRY_S = 2.0  # how often tiers are looked at that could not be reached

Keep: TypeAlias = Collection[BlockKey]
Erase: TypeAlias = Callable[[str, Tombstone, Callable[[], Keep]], bool]
"""Deletes from the tier at an address; returns False where that must be tried again."""


class RemoteDeleter:
    """Works through tombstones."""

    def __init__(self, tombstones: Tombstones, keep: Callable[[], Keep], erase: Erase) -> None:
        """`keep` are the blocks of all agents here."""
        self._tombstones = tombstones
        self._keep = keep
        self._erase = erase

    def finish(self) -> list[str]:
        """Delete what can be deleted now; the addresses of tiers that still have some of it."""
        places, keep = self._tombstones.places(), cache(self._keep)  # reads all agents, if need be
        usable = set(places)  # a tier that is no setting now may be one again
        for path, dead in self._tombstones.all().items():
            left = [at for at in dead.left if at not in usable or not self._erase(at, dead, keep)]
            usable.difference_update(left)
            self._tombstones.finish(path, dead, left)
        return [address for address in places if address not in usable]

    def left(self) -> list[str]:
        """The addresses of tiers that have some of it, as far as is known now."""
        places = self._tombstones.places()
        try:
            left = {address for dead in self._tombstones.all().values() for address in dead.left}
        except OSError:  # any of them may
            return places
        return [address for address in places if address in left]


class DeleterThread:
    """Does so in a server, whenever something was deleted and as long as something is left."""

    def __init__(self, deleter: RemoteDeleter) -> None:
        self._deleter = deleter
        self._changed = threading.Condition()
        self._n_noticed, self._n_tried = 1, 0  # deletions; an earlier process may have left some
        self._left: list[str] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="keepwarm-deleter", daemon=True)
        self._thread.start()

    def notice(self) -> None:
        """Something was deleted; from any thread, without waiting."""
        with self._changed:
            self._n_noticed += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> list[str]:
        """Wait until it was tried; the addresses of tiers that were not reached by then."""
        with self._changed:
            until = self._n_noticed
            self._changed.wait_for(lambda: self._n_tried >= until or self._closing, timeout_s)
            if self._n_tried >= until:
                return list(self._left)
        return self._deleter.left()

    def close(self) -> None:
        """What is under way ends when the tiers are closed; the rest is done after the start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (n_noticed := self._next()) is not None:
            try:
                left = self._deleter.finish()
            except Exception as error:  # whatever it is, it must not end the thread
                LOG.warning("what was deleted could not be deleted from shared tiers: %s", error)
                left = self._deleter.left()
            with self._changed:
                self._n_tried, self._left = n_noticed, left
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Wait for a deletion, or for the time of another try; how many deletions there were."""
        with self._changed:
            timeout_s = RETRY_S if self._left else None
            self._changed.wait_for(
                lambda: self._n_noticed > self._n_tried or self._closing, timeout_s
            )
            return None if self._closing else self._n_noticed


def erase_from(tiers: Mapping[str, RemoteTier]) -> Erase:
    """Deletes from tiers that are open, by address."""

    def erase(address: str, dead: Tombstone, keep: Callable[[], Keep]) -> bool:
        tier = tiers.get(address)
        if tier is None or tier.is_open or not tier.is_writable:
            return False
        return erase_from_tier(tier, dead.namespaces, dead.blocks, keep())

    return erase


def erase_from_tier(
    tier: RemoteTier, namespaces: Sequence[Namespace], blocks: Sequence[NamedBlock], keep: Keep
) -> bool:
    """Delete blocks for good, in every class; False if that must be tried again."""
    delete = partial(erase_blocks, tier.backend, tier.cipher, namespaces, blocks, keep)
    return tier.clear([block.key for block in blocks], partial(delete, known=tier.classes))


def erase_at_once(password: str, cipher: Cipher | None, own_class: str) -> Erase:
    """Deletes from tiers that are opened for it, as by the command line."""

    def erase(address: str, dead: Tombstone, keep: Callable[[], Keep]) -> bool:
        with closing(open_backend(address, password)) as backend:
            try:
                known = own_class, f"mixed-{own_class}"
                erase_blocks(backend, cipher, dead.namespaces, dead.blocks, keep(), known=known)
            except CallError as error:
                LOG.info("a shared tier does not answer: %s", error)
                return False
        return True

    return erase


def erase_blocks(
    backend: Backend,
    cipher: Cipher | None,
    namespaces: Iterable[Namespace],
    blocks: Iterable[NamedBlock],
    keep: Collection[BlockKey],
    *,
    known: Collection[str],
) -> None:
    """Delete blocks, whichever of the namespaces they are in, with longer and shorter copies, but
    none in `keep`; in `known` classes and all that are listed. Raises CallError.
    """
    listed = list_classes(backend, CALL_S)
    if not listed or backend.sizes([STORE_META], CALL_S) == [None]:
        raise CallError("it does not tell what it holds")  # not mounted, or some of it is evicted
    by_parent: defaultdict[BlockKey, list[NamedBlock]] = defaultdict(list)
    for block in blocks:
        if block.key not in keep:
            by_parent[block.parent].append(block)
    namespaces = list(namespaces)
    for compute_class in {*listed, *known}:
        for namespace in namespaces:
            for parent, doomed in by_parent.items():
                folder = _Folder(backend, cipher, compute_class, namespace, parent)
                folder.erase(doomed, keep)


class _Folder:
    """The records that follow one block."""

    def __init__(
        self,
        backend: Backend,
        cipher: Cipher | None,
        compute_class: str,
        namespace: Namespace,
        parent: BlockKey,
    ) -> None:
        self._backend, self._cipher = backend, cipher
        self._names = RemoteNames(compute_class)
        self._signed = RemoteNames(compute_class, has_mac=True)
        self._namespace, self._parent = namespace, parent

    def erase(self, blocks: Sequence[NamedBlock], keep: Collection[BlockKey]) -> None:
        listed = self._listed()
        doomed = set(self._deleting(listed, blocks)) - set(keep)
        names = [one.name for key in doomed & listed.keys() for one in listed[key]]
        if self._backend.in_batches:  # the list of a folder may have been evicted before its names
            has_windows = any(_is_window(one) for blobs in listed.values() for one in blobs)
            for block in blocks:
                names += self._names_of(block, has_windows or block.key not in listed)
        told = (self._names.told_by(self._namespace, name) for name in names)
        names = [*chain.from_iterable(told), *names]
        for start in range(0, len(names), AT_ONCE):
            self._backend.delete(names[start : start + AT_ONCE], CALL_S)

    def _listed(self) -> dict[BlockKey, list[Listed]]:
        """Records, by block."""
        found: defaultdict[BlockKey, list[Listed]] = defaultdict(list)
        folder = self._names.folder(self._namespace, self._parent)
        for blob in self._backend.list_names(folder, CALL_S):
            if (word := parse_last(blob.name)) is not None:
                found[word.key].append(blob)
        return dict(found)

    def _deleting(
        self, listed: Mapping[BlockKey, Sequence[Listed]], blocks: Sequence[NamedBlock]
    ) -> Iterator[BlockKey]:
        """The blocks, those that begin with an open one, and their own beginnings."""
        keys = {block.key for block in blocks}
        yield from keys
        lengths = {key: n for key, blobs in listed.items() if (n := _n_tokens(blobs))}
        own = [self._tokens_of(listed[key]) for key in keys & listed.keys()]
        starts = {self._key(one[: 4 * n]) for one in own for n in set(lengths.values())}
        yield from (key for key in listed if key in starts)
        opened = {block.n_tokens for block in blocks if block.is_open}
        for key, n_tokens in lengths.items():
            if opened and n_tokens > min(opened):
                tokens = self._tokens_of(listed[key])
                if any(self._key(tokens[: 4 * n]) in keys for n in opened if 4 * n < len(tokens)):
                    yield key

    def _key(self, tokens: bytes) -> BlockKey:
        return block_key(self._namespace, self._parent, tokens)

    def _tokens_of(self, blobs: Sequence[Listed]) -> bytes:
        """As a record says; empty if none does."""
        for name, n_bytes, _ in blobs:
            size = n_bytes or self._backend.sizes([name], CALL_S)[0] or 0
            opened = read_header(self._backend, self._cipher, name, size, CallDeadline(CALL_S))
            if opened is not None and opened.header.namespace == self._namespace:
                return opened.header.tokens
        return b""

    def _names_of(self, block: NamedBlock, has_windows: bool) -> Iterator[str]:
        """All that its records can have."""
        for part in Part if has_windows else (Part.DELTA, Part.STATE):
            for rows in range(block.n_tokens + 1 if part is Part.WINDOW else 1):
                record = RemoteRecord(
                    self._namespace, self._parent, block.key, part, block.n_tokens, rows
                )
                yield from (names.of(record) for names in (self._names, self._signed))


def _is_window(blob: Listed) -> bool:
    word = parse_last(blob.name)
    return word is not None and word.part is Part.WINDOW


def _n_tokens(blobs: Sequence[Listed]) -> int:
    """As the names of its records say; 0 if it has none: a pointer's says nothing of it."""
    words = (parse_last(one.name) for one in blobs)
    return max((word.n_tokens for word in words if word and word.part), default=0)

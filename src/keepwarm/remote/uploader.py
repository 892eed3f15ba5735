"""Writing to the tiers that machines share: behind the disk, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, Namespace, block_key, chain
from keepwarm.records.at_rest import at_rest
from keepwarm.records.record import Part, Record
from keepwarm.remote.records import RemoteRecord
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.disk.write_budget import WriteBudget
from keepwarm.store.tier import BlockInfo, CheckpointRef, NamedBlock
from keepwarm.store.tiers import Tiers

LOG = logging.getLogger(__name__)
MAX_QUEUED = 1 << 24  # bytes of token ids; records are read one at a time, when it is written
MAX_TELLING = 4  # answers that are told at the same time; nobody waits for more
CLOSE_S = 2.0  # that a closing store goes on for


class Use(NamedTuple):
    """A use of a prompt: its blocks, and others that were read for it."""

    namespace: Namespace
    refs: Sequence[BlockRef]
    others: Collection[BlockKey] = ()

    @property
    def n_bytes(self) -> int:
        """What it takes while it waits."""
        return sum(len(ref.tokens) for ref in self.refs)


class Uploader:
    """Shares blocks that were used again: root first, so that what is shared can be reached.

    Nobody waits for it, and what finds no room in the queue is offered again with its next use.
    """

    def __init__(
        self,
        shared: Sequence[RemoteTier],
        here: Tiers,
        kept: Callable[[Collection[BlockKey]], dict[BlockKey, BlockInfo]],
        budget: WriteBudget | None = None,
        delete_later: Callable[[Namespace, NamedBlock], None] = lambda *_: None,
        *,
        may_share: Callable[[], bool] = lambda: True,
    ) -> None:
        """`kept` says which blocks are on disk or will be: others are not shared. `budget` is what
        may be written in a day. `may_share` is False once blocks here may be of another class.
        """
        self._budget = budget
        self._delete_later = delete_later
        self._may_share = may_share
        self._shared = shared
        self._here = here
        self._kept = kept
        self._offers: deque[tuple[Use, Future[None]]] = deque()
        self._n_queued = 0
        self._closing = False
        self._changed = threading.Condition()
        self._teller = ThreadPoolExecutor(MAX_TELLING, "keepwarm-teller")  # waits for no upload
        self._telling: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="keepwarm-uploader", daemon=True)
        self._thread.start()

    def offer(
        self, namespace: Namespace, refs: Sequence[BlockRef], others: Collection[BlockKey] = ()
    ) -> Future[None]:
        """Share the blocks of a prompt; from any thread, without waiting. Done when it was tried,
        or there was no room for it.
        """
        use, tried = Use(namespace, refs, others), Future[None]()
        tried.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it
        with self._changed:
            if not self._closing and self._n_queued + use.n_bytes <= MAX_QUEUED:
                self._offers.append((use, tried))
                self._n_queued += use.n_bytes
                self._changed.notify_all()
                return tried
        tried.set_result(None)
        return tried

    def tell(
        self,
        namespace: Namespace,
        text: str,
        answers: Callable[[], bytes],
        tokens: Sequence[int],
        is_wanted: Callable[[], bool],
    ) -> Future[None] | None:
        """Tell other machines what answers a conversation of these tokens has; from any thread,
        without waiting. Done when they can know, or cannot in time: after ANSWERS_S for each tier
        at the latest. None if there is nobody to wait for. If it is not wanted by then, because it
        was deleted, it is taken back.
        """
        usable = [tier for tier in self._shared if not tier.is_open]

        def tell() -> None:
            told = answers()
            *_, end = chain(namespace, tokens)
            for tier in usable if self._fits(len(told)) else ():
                if not tier.tell(namespace, text, told, end, is_wanted):
                    self._delete_later(namespace, NamedBlock(end.key, end.parent, end.n_tokens))

        with self._changed:
            if self._closing or not usable:
                return None
            before = [one for one in self._telling if not one.done()]
            told = self._teller.submit(tell)
            self._telling = [*before, told]
        return told if len(before) < MAX_TELLING else None

    def close(self) -> None:
        """Go on for a moment, then leave the rest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._n_queued or self._is_idle, CLOSE_S)
            self._closing = True
            left = [tried for _, tried in self._offers]
            self._offers.clear()
            self._changed.notify_all()
        self._teller.shutdown(cancel_futures=True)
        self._thread.join()
        for tried in left:
            tried.set_result(None)

    @property
    def _is_idle(self) -> bool:
        """Whether no tier takes anything now."""
        return all(tier.is_open for tier in self._shared)

    def _run(self) -> None:
        while (offered := self._next()) is not None:
            use, tried = offered
            try:
                if self._may_share():
                    self._share(use)
            except Exception:  # one bad record must not stop the thread
                LOG.exception("blocks could not be shared")
            with self._changed:
                self._n_queued -= use.n_bytes
                self._changed.notify_all()
            tried.set_result(None)

    def _next(self) -> tuple[Use, Future[None]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._offers or self._closing)
            return None if self._closing else self._offers.popleft()

    def _blocks_of(self, use: Use) -> Iterator[BlockKey]:
        """Blocks that hold what was used, in order: also states inside of blocks, and the blocks
        that the last tokens lie in.
        """
        states: dict[BlockKey, list[CheckpointRef]] = {}
        for state in self._here.states([ref.parent for ref in use.refs]):
            states.setdefault(state.parent, []).append(state)
        for ref in use.refs:
            for key, parent, n_tokens in states.get(ref.parent, ()):
                if key == block_key(use.namespace, parent, ref.tokens[: 4 * n_tokens]):
                    yield key
            yield ref.key
        last = use.refs[-1]
        if last.n_tokens < BLOCK_TOKENS:
            around = self._here.children(last.parent, last.tokens)
            yield from (child.key for child in around if child.n_common == last.n_tokens)
        yield from use.others

    def _share(self, use: Use) -> None:
        keys = list(dict.fromkeys(self._blocks_of(use)))
        kept = self._kept(keys)
        whole = {ref.key for ref in use.refs if ref.n_tokens == BLOCK_TOKENS}
        for tier in self._shared:
            for key in keys:
                if self._closing or tier.is_open or not tier.is_writable:
                    break
                parts = sorted(kept[key].parts) if key in kept else ()
                fails = (part for part in parts if not self._share_record(tier, key, part))
                if any(key in whole and part is not Part.STATE for part in fails):
                    break  # what follows could not be reached
            tier.note_use(keys)

    def _share_record(self, tier: RemoteTier, key: BlockKey, part: Part) -> bool:
        """False if others may not find it there now."""
        if tier.knows(key, part):
            return True
        header = self._read(key, part, ())
        is_there = header and tier.has(header.header)
        found = self._read(key, part) if is_there is False else None
        if found is None:
            return bool(is_there)
        record = at_rest(found)  # so that the budget counts what is sent
        if not self._fits(record.n_bytes):
            return False
        put = tier.put(record)
        is_late = put.durable.exception() is not None  # it was sent, and may be there
        self._give_back(put.n_saved if put.stored else 0 if is_late else record.n_bytes)
        is_sent = put.stored or is_late
        is_deleted = is_sent and not self._kept([key])  # an `rm` may have looked before
        there = RemoteRecord.of(record.header)
        if is_deleted and not tier.withdraw(there):
            block = NamedBlock(there.key, there.parent, there.n_tokens)
            self._delete_later(there.namespace, block)
        return put.stored or (not is_sent and bool(tier.has(record.header)))  # another was faster

    def _fits(self, n_bytes: int) -> bool:
        try:
            return self._budget is None or self._budget.take(n_bytes)
        except OSError:  # another process holds the lock: it is offered again
            return False

    def _give_back(self, n_bytes: int) -> None:
        if self._budget is not None and n_bytes:
            with suppress(OSError):  # then the budget is a little smaller
                self._budget.give_back(n_bytes)

    def _read(
        self, key: BlockKey, part: Part, tensors: Collection[str] | None = None
    ) -> Record | None:
        found = (tier.read(key, part, tensors) for _, tier in self._here.named)
        return next(filter(None, found), None)

"""The block store: three lines give a plain mlx-lm script a persistent prompt cache.

kw = keepwarm.Store().attach(model, source=path_or_id)
cache, rest = kw.restore(tokens)
kw.commit(tokens, cache)
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from keepwarm import blas, config, kv
from keepwarm.agents.agent import Agent, Branch, check_metadata
from keepwarm.agents.agent_store import AgentStore, handshake_with
from keepwarm.agents.block_refs import Holder
from keepwarm.agents.rewriting import PrefixBlock, prefix_records
from keepwarm.agents.shares import AgentLimits
from keepwarm.cache.identity import identity_of
from keepwarm.cache.restore.forgetting import Forget, Forgetting
from keepwarm.cache.restore.loading import Reader, RestoreFailures
from keepwarm.cache.restore.rates import RatesFile
from keepwarm.cache.restore.records import block_of
from keepwarm.cache.restore.restorer import MixedBlocks, Restorer, UnverifiedBlocks
from keepwarm.cache.restore.writing import MemorySaver, Writer, WriteStats
from keepwarm.device.machine import speed_class
from keepwarm.device.memory import MemoryConfig
from keepwarm.errors import BadInput, InsufficientResources, StoreFailed, UnknownAgent
from keepwarm.kv.buffers import HostArray
from keepwarm.kv.kinds import is_empty
from keepwarm.kv.slabs import SlabPool
from keepwarm.kv.slices import Block, Rows
from keepwarm.models.catalog import locate
from keepwarm.models.hub import revision_of
from keepwarm.prefix.blocks import BlockKey, chain, pack, unpack
from keepwarm.prefix.fingerprint import Identity, namespace
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Record
from keepwarm.store.counts import CountsFile
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.disk.maintenance import file_path, write_file
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tier import BlockChanges, StoredBlock, Tier, TierStats, as_store_errors
from keepwarm.store.tiers import SHARED, Tiers

if TYPE_CHECKING:
    from keepwarm.remote.opening import SharedTiers

LOG = logging.getLogger(__name__)
LAYER = re.compile(r"L(\d+)")
MIXED = "mixed-numerics"  # a file: the index may be lost while the blocks stay
SCRATCH_BYTES = 2 << 30  # of a store for trials, which has to be freed when a request comes


@dataclass(frozen=True)
class Budgets:
    """How many bytes each tier may take. `disk = False` keeps everything in memory."""

    memory_bytes: int | None = 1 << 30  # None: scaled to the machine, or set by the engine
    queue_bytes: int = 1 << 30
    disk: bool = True
    disk_bytes: int | None = 20 << 30
    min_free_disk_bytes: int = 2 << 30
    disk_writes_per_day: int | None = None  # bytes; SSDs wear

    def __post_init__(self) -> None:
        least = {"disk_writes_per_day": 1}  # 0 would write nothing; None is no limit
        for name, value in vars(self).items():
            if value is not None and value < least.get(name, 0):
                raise BadInput(f"{name} is {value}; it must be {least.get(name, 0)} or more.")

    @classmethod
    def of(cls, settings: config.Settings) -> Budgets:
        return cls(
            memory_bytes=settings.memory_bytes or None,
            disk_bytes=settings.disk_bytes,
            disk_writes_per_day=settings.disk_writes_per_day or None,
        )


class RestoredPrompt(NamedTuple):
    """Caches that hold the first tokens of a prompt, and the tokens still to be fed."""

    cache: kv.Caches
    rest: list[int]


class AttachedModel:
    """A store as one model uses it."""

    def __init__(
        self,
        model: Any,
        identity: Identity,
        restorer: Restorer,
        kv_options: dict[str, Any],
        store: Store,
    ) -> None:
        self._store = store
        self._model = model
        self._kv_options = kv_options
        self.identity = identity
        self.restorer = restorer

    def restore(self, tokens: Sequence[int]) -> RestoredPrompt:
        """Caches for the longest stored prefix, or empty ones."""
        prompt = self._ids(tokens)
        found = self.restorer.restore(prompt)
        caches = found.caches or kv.make_caches(self._model, **self._kv_options)
        return RestoredPrompt(caches, prompt[found.n_tokens :])

    def on_progress(self, tokens: Sequence[int], cache: kv.Caches) -> Callable[[int, int], None]:
        """A `prompt_progress_callback` for mlx-lm: saves a prompt while it is prefilled.

        `cache` is what `restore` returned for these tokens. On a model with states only this keeps
        a place before the end, from which the same prompt can go on again.
        """
        tokens = self._ids(tokens)
        capture, last = self.restorer.open(tokens), len(tokens) - 1
        points: frozenset[int] = frozenset()

        def keep(n_done: int, n_rest: int) -> None:
            nonlocal points
            upto = len(tokens) - n_rest + n_done
            if not n_done:
                _check_start(cache, upto)
                capture.start_at(upto)
                points = self.restorer.points(tokens, (), upto)
                capture.expect(points)
            elif upto <= last:  # the last call comes when the cache holds more
                kv.evaluate(cache)
                capture.capture(cache, upto, checkpoint=upto in points)

        return keep

    def commit(self, tokens: Sequence[int], cache: kv.Caches) -> None:
        """Save a cache that represents exactly these tokens. It can be restored at once.

        One that is not this model's is refused. Where all layers are states, which do not count
        tokens, their number cannot be checked.
        """
        self._save(self.restorer, self._checked(tokens, cache), cache, Policy.READ_WRITE)

    def _save(
        self, restorer: Restorer, tokens: list[int], cache: kv.Caches, policy: Policy
    ) -> bool:
        """Save a cache, in as many steps as the queue needs. Whether all of it is saved: if it is
        to be durable, on disk by now.
        """
        keys = [ref.key for ref in chain(restorer.namespace, tokens)]
        n_before = -1
        while True:
            capture = restorer.open(tokens, policy)
            capture.start_at(restorer.n_kept(tokens[:-1]))  # a block at the end may lack its state
            capture.finish(tokens, kv.evaluate(cache))
            if policy is not Policy.DURABLE and restorer.survives(tokens):
                return True
            self._store.flush()
            if restorer.is_on_disk(tokens):
                return True
            n_bytes = sum(block.n_bytes for block in restorer.kept(keys).values())
            if n_bytes <= n_before:
                return False
            n_before = n_bytes

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        if self._store.is_closed:
            raise StoreFailed("The store is closed; open it again.")
        return _token_ids(tokens)

    def _checked(self, tokens: Sequence[int], cache: kv.Caches) -> list[int]:
        """The ids of these tokens; raises if a cache is not this model's, or holds others."""
        ids, count = self._ids(tokens), kv.token_count(cache)
        if count is not None and count != len(ids):
            raise BadInput(
                f"The cache holds {count} tokens, but {len(ids)} were given; pass its tokens."
            )
        self.restorer.layout.check(cache)
        return ids

    def save_agent(self, agent_id: str, blocks: AgentBlocks) -> Agent:
        """Store blocks as a new agent: the inverse of `Store.load_agent`.

        They must fit this model, but nothing proves what they were computed from: as those of a
        bundle, they serve only this agent and its forks.
        """
        whole = _whole_blocks(blocks.layers)
        caches = kv.reconstruct_cache(self.restorer.layout, whole, blocks.n_tokens)
        return self.import_agent(agent_id, blocks.tokens, caches, metadata=blocks.metadata)

    def import_agent(
        self,
        agent_id: str,
        tokens: Sequence[int],
        cache: kv.Caches,
        model: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> Agent:
        """Store a cache of somebody else, which holds these tokens, as a new agent."""
        on_disk, notes, tokens = self._store.on_disk, metadata or {}, self._checked(tokens, cache)
        check_metadata(notes)
        with suppress(UnknownAgent):
            on_disk.agents.show(agent_id)
            raise BadInput(f"Agent {agent_id!r} already exists; choose another id.")
        name = on_disk.register(replace(self.identity, origin=secrets.token_hex(16)))
        self._store.flush()  # so that nothing queued is dropped to make room
        if not self._save(self.restorer.in_namespace(name), tokens, cache, Policy.DURABLE):
            on_disk.agents.advance(agent_id, name, tokens, is_wanted=lambda: False)  # is deleted
            raise InsufficientResources(
                "The cache was not imported, because not all of it could be saved; look at the "
                "disk, raise disk_bytes or disk_writes_per_day, then import it again."
            )
        n_tokens = len(tokens)
        head = Branch.of(name, tokens, [n_tokens], n_opening=n_tokens, main=True, model=model)
        return on_disk.agents.create(agent_id, head, metadata=dict(notes))


def _check_start(cache: kv.Caches, n_tokens: int) -> None:
    """Raise unless a cache holds what comes before a prefill. States count no tokens: of them only
    whether they hold any is known."""
    is_new = all(is_empty(layer) for layer in cache)
    if kv.token_count(cache) not in (None, n_tokens) or is_new != (n_tokens == 0):
        raise BadInput(
            f"The prefill begins at token {n_tokens}, but the cache holds other tokens; "
            "pass mlx-lm the cache and the rest that `restore` returned."
        )


def _token_ids(tokens: Sequence[int]) -> list[int]:
    """The ids of a list or an array."""
    listed: Any = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        ids = unpack(pack(list(listed)))
    except (TypeError, OverflowError):
        raise BadInput(
            "Tokens must be the ids of one sequence, a list or array of whole numbers from 0 on."
        ) from None
    if not ids:
        raise BadInput("There are no tokens; pass those of a prompt.")
    return ids


class AgentBlocks(NamedTuple):
    """What is stored of an agent: its blocks in order, by layer, and the tokens that they hold."""

    layers: Mapping[int, Sequence[Block]]
    tokens: Sequence[int]
    metadata: Mapping[str, str]

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class Store:
    """Blocks of every model, on disk under `path` and in memory. Close it, or use `with`.

    Blocks are looked up in memory, then among records queued for the disk, then on disk.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        budgets: Budgets | None = None,
        settings: config.Settings | None = None,
    ) -> None:
        self.settings = settings or config.load(store=path)
        budgets = budgets or Budgets.of(self.settings)
        self.is_closed = False
        self._rates = RatesFile(self.settings.home)
        self._is_memory_fixed = budgets.memory_bytes is not None
        self.memory = MemoryTier(_memory_bytes(budgets))
        self.saver = MemorySaver(self.memory)
        self._on_disk: AgentStore | None = None
        self.counts = CountsFile(None)
        self.restore_failures = RestoreFailures()
        self._forgetting: Forgetting | None = None
        self._tiers: dict[str, Tier] = {"memory": self.memory}
        lookups: list[tuple[str, Tier]] = [("memory", self.memory)]
        if budgets.disk:
            self._on_disk = self._open_disk(budgets)
            disk, self.counts = self._on_disk.disk, self._on_disk.counts
            self._forgetting = Forgetting(disk)
            wear, catch_up = self._on_disk.wear, self._forgetting.catch_up
            writer = Writer(self.memory, disk, budgets.queue_bytes, wear, catch_up)
            self._forgetting.add_tier(self.memory)
            self._forgetting.add(writer.forget)
            disk.is_wanted = writer.holds
            self.saver = writer
            self._tiers["disk"] = disk
            lookups += [("memory", writer.queued), ("disk", disk)]
        with ExitStack() as opened:  # closed if the rest fails
            if self._on_disk is not None:
                opened.callback(self._on_disk.close)
            opened.callback(self.saver.close)
            self._mixed = self._note_mixed()
            self._unverified = UnverifiedBlocks(self._on_disk)
            self._shared = self._open_shared()
            opened.pop_all()
        self._lookups = Tiers(lookups, () if self._shared is None else self._shared.tiers)
        if self._shared is not None and self._on_disk is not None:
            keep, was_mixed = self._on_disk.blocks_of_agents, self._mixed.are_here
            self._shared.start(
                *(self._lookups.local, self.saver.kept, keep),
                may_share=lambda: was_mixed or not self._mixed.learn(),
            )
            self.add_forget(self._shared.notice_deletion)
        self._reader = Reader(self._lookups, SlabPool.if_cuda(), self.memory)
        self._resize(_memory_bytes(budgets))

    def scratch(self) -> Store:
        """A store in memory alone, for trials; what they show of speeds is kept."""
        budgets = Budgets(memory_bytes=SCRATCH_BYTES, disk=False)
        scratch = Store(budgets=budgets, settings=self.settings)
        scratch._rates = self._rates
        return scratch

    def _open_disk(self, budgets: Budgets) -> AgentStore:
        limits = DiskLimits(budgets.disk_bytes, budgets.min_free_disk_bytes)
        secret = self.settings.read_secret("encryption_key")
        retention_s = self.settings.retention_s or None
        return AgentStore(
            self.settings.store,
            limits,
            budgets.disk_writes_per_day,
            secret,
            retention_s,
            handshake=handshake_with(self.settings),
        )

    def _open_shared(self) -> SharedTiers | None:
        """None without a disk: what a tier is marked with, and which are, is kept there."""
        if self._on_disk is None or not self.settings.remotes:
            return None
        from keepwarm.remote.opening import SharedTiers  # only fleets need it

        disk, note = self._on_disk.disk, self._unverified.note
        shared = SharedTiers(self.settings, self.memory, disk, self._mixed.are_here, note)
        if self._forgetting is not None:
            for tier in shared.tiers:
                tier.unless_forgotten = self._forgetting.unless_forgotten
        return shared

    def _note_mixed(self) -> MixedBlocks:
        """Whether blocks of other classes may be here; noted if the setting allows them."""
        if self._on_disk is None:
            return MixedBlocks()
        is_now = bool(self.settings.remotes) and self.settings.share_numerics == "any"
        disk = self._on_disk.disk
        with as_store_errors(disk, "note where its blocks come from"):
            path = file_path(disk, "models", MIXED)
            if is_now:
                write_file(disk, path, b"")
            return MixedBlocks(path, are_here=path.exists())

    @property
    def on_disk(self) -> AgentStore:
        """Agents and blocks on disk."""
        if self._on_disk is None:
            raise BadInput("This store keeps nothing on disk; open it with a disk budget.")
        return self._on_disk

    def limit(self, limits: AgentLimits) -> None:
        """From now on, for each key that uses this store."""
        if self._on_disk is not None:
            self._on_disk.limit(limits)

    def attach(
        self,
        model: Any,
        source: Path | str,
        *,
        adapter: Path | str | None = None,
        salt: str = "",
        layout: kv.Layout | None = None,
        **kv_options: Any,
    ) -> AttachedModel:
        """Save and restore caches of this mlx-lm model; `source` is the path or id of its weights.

        `adapter` is the directory of its adapter, `kv_options` are those of
        `keepwarm.kv.make_caches`. These and the salt are part of the model's identity: blocks saved
        with others are not found. Without `layout`, which `keepwarm.kv.probe` finds, the model is
        run once. Files that were replaced since the model was loaded are taken for those it has.
        """
        blas.start(self.settings.home)  # the probe runs the model
        layout = layout or kv.probe(model, kv.make_caches(model, **kv_options))
        path = locate(str(source), self.settings)
        identity = identity_of(
            model,
            path,
            self.settings,
            adapter=adapter,
            layout=layout,
            salt=salt,
            **kv_options,
        )
        restorer = self.make_restorer(identity, layout, revision_of(path))
        return AttachedModel(model, identity, restorer, kv_options, self)

    def make_restorer(self, identity: Identity, layout: kv.Layout, revision: str = "") -> Restorer:
        """The restorer of one model with one set of KV options; `revision` is the hub's."""
        on_disk = self._on_disk
        name = namespace(identity) if on_disk is None else on_disk.register(identity, revision)
        if self._reader.slabs is not None:
            self._reader.slabs.expect(kv.slab_sizes(layout))
        everyones = namespace(replace(identity, salt="", origin=""))
        return Restorer(
            name,
            layout,
            self._lookups,
            self._reader,
            self.saver,
            self._rates.of(everyones),
            failures=self.restore_failures,
            forgetting=self._forgetting,
            uploader=None if self._shared is None else self._shared.uploader,
            mixed=self._mixed,
            unverified=self._unverified,
            machine=speed_class(),
            at_rest=identity.kv_options.get("at_rest"),
        )

    def load_agent(self, agent_id: str, branch: int | None = None) -> AgentBlocks:
        """What is on disk of an agent's head, or of a branch: blocks by layer, in order.

        `keepwarm.kv.concatenate_cache_blocks` makes K and V of a layer from them. Blocks after one
        that was evicted are left out.
        """
        agent = self.on_disk.find(agent_id, branch=branch)
        return _load_blocks(self.on_disk.disk, agent, list(self.on_disk.holders(agent)))

    def policy_for(self, agent_id: str | None, policy: Policy) -> Policy:
        """The policy with which an agent's request runs: of an ephemeral one nothing is written."""
        if agent_id is None:
            return policy
        self.check_agent(agent_id)
        if not self.is_ephemeral(agent_id) or not policy.to_disk:
            return policy
        if policy is Policy.DURABLE:
            raise BadInput(
                f"Agent {agent_id!r} is ephemeral, so nothing of it is written to disk; "
                "use another policy, or an agent that is not."
            )
        return Policy.EPHEMERAL

    def is_ephemeral(self, agent_id: str) -> bool:
        return self._on_disk is not None and self._on_disk.agents.is_ephemeral(agent_id)

    def origin_of(self, agent_id: str) -> str:
        """The import that an agent's blocks came with; "" for any other agent, or none."""
        if self._on_disk is None:
            return ""
        try:
            return self._on_disk.origin_of(self._on_disk.agents.show(agent_id))
        except BadInput:  # new, or its file is damaged
            return ""

    def fork_import(self, agent_id: str, fork_id: str, *, ephemeral: bool = False) -> None:
        """Record a fork of an imported agent, unless it is known: by its name it finds the blocks.

        Blocks that were computed here are found without a name.
        """
        if self.origin_of(agent_id):
            with suppress(BadInput):
                self.on_disk.agents.fork_all(agent_id, [fork_id], ephemeral=ephemeral)

    def check_agent(self, agent_id: str | None, *, exists: bool = False) -> None:
        """Raise if this cannot be an agent's id, or with `exists` is none; None is no agent."""
        if self._on_disk is not None and agent_id is not None:
            self._on_disk.agents.check_id(agent_id)
            if exists:
                self._on_disk.agents.show(agent_id)

    def knows_agent(self, agent_id: str) -> bool:
        """Whether there is an agent with this id that has turns."""
        if self._on_disk is None:
            return False
        try:
            return self._on_disk.agents.show(agent_id).n_tokens > 0
        except UnknownAgent:
            return False

    def forget(self, agent_id: str) -> int:
        """Delete an agent and all blocks that no other uses, also in memory; how many blocks."""
        n_deleted = self.on_disk.agents.delete(agent_id)
        self.catch_up()
        return n_deleted

    def forget_expired(self) -> None:
        """Forget the agents that were not used for their retention time. May be called often."""
        try:
            if self._on_disk is not None and self._on_disk.expire():
                self.catch_up()
        except Exception:
            if not self.is_closed:
                LOG.exception("agents past their retention could not be forgotten")

    def unreached(self) -> list[str]:
        """The addresses of shared tiers that still have some of what was deleted here; they are
        tried again.
        """
        return [] if self._shared is None else self._shared.unreached()

    def catch_up(self) -> int:
        """Forget what any process has deleted on purpose; the generation that this leads to."""
        return 0 if self._forgetting is None else self._forgetting.catch_up()

    def has_deleted(self, agent_id: str, since: int) -> bool:
        """Whether an agent was deleted after a generation, as far as `catch_up` has seen."""
        return self._forgetting is not None and self._forgetting.has_deleted(agent_id, since)

    def add_forget(self, forget: Forget) -> None:
        """Have `forget` called with all that any process deletes on purpose from now on."""
        if self._forgetting is not None:
            self._forgetting.add(forget)

    def allow_memory(self, n_bytes: int) -> None:
        """Set the memory budget, unless the caller or the settings have fixed one."""
        if not self._is_memory_fixed:
            self._resize(n_bytes)

    def _resize(self, n_bytes: int) -> None:
        self.memory.resize(n_bytes)
        if self._reader.slabs is not None:
            self._reader.slabs.allow(n_bytes)

    @property
    def slab_bytes(self) -> int:
        """What MLX's arrays take of the host's memory, on CUDA."""
        return 0 if self._reader.slabs is None else self._reader.slabs.n_bytes

    def release(self, n_bytes: int) -> int:
        """Free about this many bytes of memory, least valuable blocks first; the bytes freed."""
        return self._trim(self.memory.release(n_bytes))

    def clear_memory(self) -> int:
        """Free all unpinned blocks in memory; blocks on disk stay."""
        freed = self._trim(self.memory.clear())
        self._resize(self.memory.stats().max_bytes or 0)
        return freed

    def _trim(self, n_bytes: int) -> int:
        if self._reader.slabs is not None:
            self._reader.slabs.trim(n_bytes)
        return n_bytes

    def blocks(self) -> dict[str, Iterator[StoredBlock]]:
        """Every block of every tier, in no order; safe while other threads put and delete."""
        return {name: tier.walk() for name, tier in self._tiers.items()}

    def changes_on_disk(self, since: int) -> BlockChanges:
        """What came and went there since then, of any process."""
        return self._on_disk.disk.changes(since) if self._on_disk else BlockChanges(0, {})

    def n_bytes(self, keys: Collection[BlockKey]) -> int:
        """Bytes of these blocks, on disk or only in memory."""
        return sum(block.n_bytes for block in self._lookups.local.have(keys).values())

    def tier_stats(self) -> dict[str, TierStats]:
        stats = {name: tier.stats() for name, tier in self._tiers.items()}
        shared = enumerate(self._lookups.shared, 1)
        return stats | {f"{SHARED} {n}": tier.stats() for n, tier in shared}

    def write_stats(self) -> WriteStats:
        return self.saver.stats()

    def flush(self) -> None:
        """Return once everything committed is on disk, where it survives a power cut."""
        self.counts.save()
        self.saver.flush()
        if self._on_disk is not None:
            self._on_disk.disk.flush()

    def close(self) -> None:
        """Write the queue to disk and close all files."""
        self.is_closed = True
        self._rates.save()
        self.saver.close()  # first: shared tiers may be slow, and the process may be killed
        if self._shared is not None:
            self._shared.stop()
        if self._on_disk is not None:
            with suppress(StoreFailed):  # it is counted
                self._on_disk.disk.flush()
        self._reader.close()
        if self._shared is not None:
            self._shared.close()
        self.memory.close()
        if self._reader.slabs is not None:
            self._reader.slabs.close()
        if self._on_disk is not None:
            self._on_disk.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _memory_bytes(budgets: Budgets) -> int:
    """The budget, or a share of the machine's memory; an engine, which knows its model, resizes."""
    if budgets.memory_bytes is None:
        return MemoryConfig.automatic().tier_bytes
    return budgets.memory_bytes


def _load_blocks(disk: DiskTier, agent: Agent, holders: Sequence[Holder]) -> AgentBlocks:
    """The blocks that hold an agent's tokens, cut to these."""
    tokens = b"".join(holder.tokens for holder in holders)
    held = [PrefixBlock(holder.key, number) for number, holder in enumerate(holders)]
    layers = _by_layer(prefix_records(disk, held, tokens))
    return AgentBlocks(layers, unpack(tokens), agent.metadata)


def _by_layer(records: Iterable[Record]) -> dict[int, list[Block]]:
    """Each layer's part of every block, as MLX arrays; the records are in order."""
    layers: defaultdict[int, list[Block]] = defaultdict(list)
    for _, parts in groupby(records, key=lambda record: record.header.number):
        blocks = [block_of(record) for record in parts]
        for layer in sorted({_layer(name) for block in blocks for name in _names(block)}):
            layers[layer].append(_of_layer(blocks, layer))
    return dict(sorted(layers.items()))


def _of_layer(parts: list[Block], layer: int) -> Block:
    """One layer of a block whose parts are in several records."""

    def own(kind: str) -> dict[str, Rows]:
        tensors = [item for part in parts for item in getattr(part, kind).items()]
        return {name: _to_mx(rows) for name, rows in tensors if _layer(name) == layer}

    firsts = {path: n for part in parts for path, n in part.first_rows.items()}
    return Block(
        parts[0].index,
        parts[0].n_tokens,
        delta=own("delta"),
        window=own("window"),
        first_rows={path: n for path, n in firsts.items() if _layer(f"L{path}") == layer},
        state=own("state"),
    )


def _whole_blocks(layers: Mapping[int, Sequence[Block]]) -> list[Block]:
    """The blocks of all layers together, in order: what `_by_layer` has divided."""
    parts: defaultdict[int, list[Block]] = defaultdict(list)
    for blocks in layers.values():
        for block in blocks:
            parts[block.index].append(block)

    def merged(own: list[Block], field: str) -> Any:
        return {name: value for block in own for name, value in getattr(block, field).items()}

    fields = ("delta", "window", "first_rows", "state")
    return [
        Block(index, max(b.n_tokens for b in own), **{name: merged(own, name) for name in fields})
        for index, own in sorted(parts.items())
    ]


def _to_mx(rows: Rows) -> Rows:
    # NOTE: no `mx.array` here: MLX must be imported by `keepwarm.kv`, which binds its BLAS late.
    return rows.to_mx() if isinstance(rows, HostArray) else rows


def _names(block: Block) -> Iterable[str]:
    return (*block.delta, *block.window, *block.state)


def _layer(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else -1

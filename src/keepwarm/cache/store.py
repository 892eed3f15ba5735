"""The block store for library users: three lines give a plain mlx-lm script a lasting prompt cache.

kw = keepwarm.Store().attach(model, source=path_or_id)
cache, rest = kw.restore(tokens)
kw.commit(tokens, cache)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from keepwarm import blas, config, kv
from keepwarm.cache.identity import Digests, identify
from keepwarm.cache.opened import Budgets, OpenedStore
from keepwarm.cache.restore.manager import Manager
from keepwarm.cache.restore.rates import RateBook
from keepwarm.cache.restore.writing import WriteStats
from keepwarm.cache.shelf import Shelf
from keepwarm.device.memory import MemoryConfig
from keepwarm.errors import BadInput
from keepwarm.models.catalog import locate
from keepwarm.prefix.fingerprint import Identity
from keepwarm.store.tier import StoredBlock, TierStats


class Restored(NamedTuple):
    """Caches that hold the first tokens of a prompt, and the tokens still to be fed."""

    cache: kv.Caches
    rest: list[int]


class Store:
    """Blocks of every model, on disk under `path` and in memory. Close it, or use `with`."""

    def __init__(
        self,
        path: Path | str | None = None,
        budgets: Budgets | None = None,
        settings: config.Settings | None = None,
    ) -> None:
        self.settings = settings or config.load(store=path)
        self._rates = RateBook(self.settings.home / "rates.json")
        budgets = budgets or Budgets.of(self.settings)
        self._chosen = budgets.memory_bytes is not None
        self._opened = OpenedStore(
            self.settings.store, _scaled(budgets), self.settings.read_encryption_key()
        )

    @property
    def shelf(self) -> Shelf:
        """Agents and blocks as they lie on disk."""
        if self._opened.shelf is None:
            raise BadInput("This store keeps nothing on disk; open it with a disk budget.")
        return self._opened.shelf

    def attach(
        self,
        model: Any,
        source: Path | str,
        *,
        adapter: Path | str | None = None,
        salt: str = "",
        **kv_options: Any,
    ) -> Attached:
        """Keep and find the caches of this mlx-lm model; `source` is where its weights lie.

        `adapter` is where those of its adapter lie. `kv_options` are those of
        `keepwarm.kv.make_caches`. All of them are part of the model's identity, as is the salt:
        with another one nothing of this is found.
        """
        blas.start(self.settings.home)  # the probe runs the model
        layout = kv.probe(model, kv.make_caches(model, **kv_options))
        identity = identity_of(
            model,
            source,
            self.settings,
            adapter=adapter,
            layout=layout,
            salt=salt,
            **kv_options,
        )
        manager = self._opened.manager(identity, layout)
        manager.rates = self._rates.of(manager.namespace)
        return Attached(model, manager, kv_options)

    def check_agent(self, agent_id: str) -> None:
        """Refuse what cannot name an agent."""
        if self._opened.shelf is not None:
            self._opened.shelf.agents.check_id(agent_id)

    def forget(self, agent_id: str) -> int:
        """Delete an agent with every block no other reaches, in memory too; their number."""
        agent = self.shelf.agents.show(agent_id)
        removed = self.shelf.agents.delete(agent_id)
        left = self.shelf.disk.have(agent.blocks)
        for key in agent.blocks:
            if key not in left:
                self._opened.memory.delete(key)
        return removed

    def allow_memory(self, n_bytes: int) -> None:
        """Blocks in memory may take so many bytes from now on, unless somebody chose how many."""
        if not self._chosen:
            self._opened.memory.resize(n_bytes)

    def shed(self, n_bytes: int) -> int:
        """Free about so many bytes of memory, least valuable first; how many it was."""
        return self._opened.memory.shed(n_bytes)

    def clear_memory(self) -> int:
        """Free all blocks in memory that nobody pinned; what is on disk stays."""
        return self.shed(sys.maxsize)

    def blocks(self) -> dict[str, Iterator[StoredBlock]]:
        """Every block of every tier, in no order; safe while others put and delete."""
        return {name: tier.walk() for name, tier in self._opened.named_tiers.items()}

    def tier_stats(self) -> dict[str, TierStats]:
        return {name: tier.stats() for name, tier in self._opened.named_tiers.items()}

    def write_stats(self) -> WriteStats:
        return self._opened.saver.stats()

    def flush(self) -> None:
        """Return once everything committed is on disk."""
        self._opened.saver.flush()

    def close(self) -> None:
        self._rates.save()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _scaled(budgets: Budgets) -> Budgets:
    """Memory that nobody chose is scaled to the machine; an engine, which knows its model, says."""
    if budgets.memory_bytes is not None:
        return budgets
    return replace(budgets, memory_bytes=MemoryConfig.automatic().tier_bytes)


def identity_of(
    model: Any,
    source: Path | str,
    settings: config.Settings,
    *,
    adapter: Path | str | None = None,
    layout: kv.Layout | None = None,
    salt: str = "",
    **kv_options: Any,
) -> Identity:
    """What tells this model's blocks from all others; reads the weights once in a lifetime."""
    if adapter is None:
        _refuse_adapter(model)
    layout = layout or kv.probe(model, kv.make_caches(model, **kv_options))
    memo = Digests(settings.home / "digests.json")
    place = locate(str(source), settings)
    weights = None if adapter is None else Path(adapter)
    return identify(place, layout, memo, adapter=weights, kv_options=kv_options, salt=salt)


def _refuse_adapter(model: Any) -> None:
    """Its files are not those of the model: unnamed, its blocks would pass for the model's own."""
    layers: list[Any] = getattr(model, "modules", list)()
    if any("lora_a" in layer for layer in layers):  # of LoRA and DoRA alike
        raise BadInput(
            "The model has an adapter, which changes its keys and values; name the adapter's "
            "directory (attach(…, adapter=…)), or fuse it into the weights with mlx_lm.fuse."
        )


class Attached:
    """One model's view of a store."""

    def __init__(self, model: Any, manager: Manager, kv_options: dict[str, Any]) -> None:
        self._model = model
        self._kv_options = kv_options
        self.manager = manager

    def restore(self, tokens: Sequence[int]) -> Restored:
        """Caches for the longest known prefix, fresh ones where nothing is known."""
        if not tokens:
            raise BadInput("There are no tokens to restore; pass a prompt.")
        found = self.manager.restore(tokens)
        caches = found.caches or kv.make_caches(self._model, **self._kv_options)
        return Restored(caches, list(tokens[found.n_tokens :]))

    def commit(self, tokens: Sequence[int], cache: kv.Caches) -> None:
        """Keep a cache that represents exactly these tokens. It is findable at once."""
        kv.evaluate(cache)
        count = kv.token_count(cache)
        if count is not None and count != len(tokens):
            raise BadInput(
                f"The cache holds {count} tokens and {len(tokens)} were named; name those it holds."
            )
        self.manager.open(tokens).finish(tokens, cache)

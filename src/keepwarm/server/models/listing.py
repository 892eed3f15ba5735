"""What is told about a model, loaded or not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from keepwarm.config import Settings
from keepwarm.errors import KeepwarmError
from keepwarm.models.catalog import n_context, read_config, read_generation_config
from keepwarm.server.models.slots import Slot
from keepwarm.text.sampling_rules import DrawRules, default_rules

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedModel:
    """One name that requests may use."""

    name: str
    created: int
    is_loaded: bool
    n_context: int | None  # None: its files do not say before it is loaded
    sampling: DrawRules  # where a request is silent
    shares_batches: bool | None = None
    path: Path | None = None  # of its files, once they are found

    @classmethod
    def of_slot(cls, name: str, slot: Slot, settings: Settings) -> Self:
        engine = slot.host.loaded
        if engine is None:
            found = cls.on_disk(name, slot.host.created, slot.path, settings)
            return replace(found, n_context=slot.n_context or found.n_context)
        context, batches = engine.model.n_context, engine.stats().shares_batches
        rules = engine.sampling
        return cls(name, slot.host.created, True, context, rules, batches, slot.path)

    @classmethod
    def on_disk(cls, name: str, created: int, path: Path | None, settings: Settings) -> Self:
        rules = default_rules(read_generation_config(path) if path else {}, settings)
        return cls(name, created, False, _context(path, settings), rules, path=path)


def _context(path: Path | None, settings: Settings) -> int | None:
    """Of a directory; a .gguf file takes long to read."""
    if path is None or not path.is_dir():
        return None
    try:
        own = n_context(read_config(path))
    except KeepwarmError as error:
        LOG.info("%s", error)
        return None
    return min(own, settings.context or own)

"""Prompt-cache files of mlx-lm and Swift, into the store and out of it.

Such a file does not name its tokens. What is exported here has them in its metadata; for any other
file the caller gives them. Nothing in a file proves who computed it, so an imported one serves only
its agent and the agent's forks, as a bundle does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm import kv
from keepwarm.agents.agent import Agent
from keepwarm.cache.identity import make_options_in
from keepwarm.cache.store import AttachedModel, Store
from keepwarm.errors import BadCacheFile, BadInput
from keepwarm.kv.files.dialects import Dialect
from keepwarm.kv.files.prompt_cache import (
    PromptCacheFile,
    export_prompt_cache,
    import_prompt_cache,
)
from keepwarm.models.load import Model
from keepwarm.prefix.fingerprint import Identity

TOKENS = "keepwarm-tokens"  # in the metadata: a JSON list of token ids
MAX_TOKEN = 1 << 31
FORMATS: Mapping[str, Dialect] = {one.value: one for one in (Dialect.MLX_LM, Dialect.SWIFT)}


class ReadPrompt(NamedTuple):
    """The caches of a file, and the tokens that they hold."""

    found: PromptCacheFile
    tokens: list[int]


def read_prompt_file(path: Path, given: Path | None = None) -> ReadPrompt:
    """A prompt-cache file, with its tokens: those of a file of token ids, else its own."""
    found = import_prompt_cache(path)
    return ReadPrompt(found, _tokens_of(found, path, given))


def _kv_options_of(found: PromptCacheFile) -> dict[str, Any]:
    """The options of `Store.attach` with which a model has caches like these."""
    leaves = [leaf for cache in found.caches for leaf in _leaves(kv.encode(cache))]
    for leaf in leaves:
        if leaf.cls == "QuantizedKVCache":
            given = {"kv_bits": leaf.scalars["bits"], "kv_group_size": leaf.scalars["group_size"]}
            return {name: n for name, n in given.items() if (name, n) != ("kv_group_size", 64)}
    return {}


def _leaves(layer: kv.EncodedCache) -> list[kv.EncodedCache]:
    return [leaf for part in layer.parts for leaf in _leaves(part)] if layer.parts else [layer]


def _tokens_of(found: PromptCacheFile, path: Path, given: Path | None) -> list[int]:
    listed = _read(given) if given is not None else found.metadata.get(TOKENS)
    if listed is None:
        raise BadInput(
            f"{path} does not contain its token ids, because Keepwarm did not export it; "
            "pass them with --tokens FILE, a JSON list."
        )
    tokens = _parsed(listed, given or path)
    n_held = kv.token_count(found.caches)
    if n_held is not None and n_held != len(tokens):
        raise BadInput(
            f"{path} holds {n_held} tokens, but {len(tokens)} ids were given; pass exactly its own."
        )
    return tokens


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise BadInput(f"{path} cannot be read ({why}); check it.") from error


def _parsed(listed: str, path: Path) -> list[int]:
    try:
        tokens = json.loads(listed)
    except (ValueError, RecursionError):
        tokens = None
    is_list = isinstance(tokens, list) and bool(tokens)
    if not is_list or not all(type(one) is int and 0 <= one < MAX_TOKEN for one in tokens):
        raise BadCacheFile(f"The tokens in {path} are not a JSON list of token ids.")
    return list(tokens)


def import_prompt_file(store: Store, model: Model, read: ReadPrompt, agent_id: str) -> Agent:
    """Store the caches of a file as an agent. On the thread that owns MLX."""
    found, tokens = read
    attached = store.attach(model.module, model.path, **_kv_options_of(found))
    return attached.import_agent(agent_id, tokens, found.caches, model.name)


def export_prompt_file(
    store: Store, model: Model, agent: Agent, path: Path, dialect: Dialect
) -> int:
    """Write an agent's conversation for mlx-lm or Swift; the number of tokens."""
    theirs = store.on_disk.identity_of(agent.namespace)
    restorer = _attach_as(store, model, theirs).restorer.in_namespace(agent.namespace)
    tokens = store.on_disk.tokens_of(agent)
    restored = restorer.restore([*tokens, 0])  # one more: a restore always leaves a token
    if restored.caches is None:
        raise BadInput(
            f"Every block of {agent.id or path.stem!r} was evicted, so nothing can be restored."
        )
    held = tokens[: restored.n_tokens]
    metadata = {TOKENS: json.dumps(held, separators=(",", ":"))}
    export_prompt_cache(path, restored.caches, metadata, dialect)
    return len(held)


def _attach_as(store: Store, model: Model, theirs: Identity) -> AttachedModel:
    """The model with the KV options of stored blocks; raises if they are of another model."""
    attached = store.attach(model.module, model.path, **make_options_in(theirs))
    ours = attached.identity
    if replace(theirs, salt=ours.salt, origin=ours.origin) != ours:
        raise BadInput(f"It was computed by another model, not {model.name}; name it with --model.")
    return attached

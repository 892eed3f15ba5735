"""Messages as vLLM publishes them, in msgpack: arrays whose first element is the event's name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey
from keepwarm.server.events.blocks import HeldBlock, Medium

Event: TypeAlias = list[Any]


def block_hash(key: BlockKey) -> int:
    """Indexers take 64-bit integers: the key's first 8 bytes."""
    return int.from_bytes(key[:8], "big")


def stored(block: HeldBlock, medium: Medium, token_ids: Sequence[int]) -> Event:
    parent = None if block.number == 0 else block_hash(block.parent)
    lora_id = None
    key = block_hash(block.key)
    return ["BlockStored", [key], parent, list(token_ids), BLOCK_TOKENS, lora_id, medium]


def removed(keys: Sequence[BlockKey], medium: Medium) -> Event:
    return ["BlockRemoved", [block_hash(key) for key in keys], medium]


def all_cleared() -> Event:
    return ["AllBlocksCleared"]


def batch(events: Sequence[Event]) -> list[Any]:
    """One message: when, what, and the rank of the engine."""
    return [time.time(), list(events), 0]

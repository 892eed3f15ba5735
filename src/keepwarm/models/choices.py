"""Models worth trying, by the memory that they need.

`choices.json` has a row for each, with its public sources, the day they were read, and the config
from which the figures are computed; a test computes them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("choices.json")
USABLE = 0.75  # of a machine's memory; the rest is for the system and other programs
LEAST_TOKENS = 16_384  # of context, or all of it: an agent's instructions and tools fill most


class ModelChoice(NamedTuple):
    id: str
    licence: str
    n_context: int
    n_weights: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_fixed_bytes: int  # windows and states
    is_loaded: bool  # whether it was loaded by us; others are known from their sources only
    sources: tuple[str, ...]
    read: str  # the day on which the sources were read

    def in_fp32(self) -> ModelChoice:
        """The same where MLX computes on a CPU, which is fastest in fp32."""
        return self._replace(
            weights_bytes=4 * self.n_weights,
            kv_bytes_per_token=2 * self.kv_bytes_per_token,
            kv_fixed_bytes=2 * self.kv_fixed_bytes,
        )

    def n_bytes(self, n_tokens: int) -> int:
        """Weights, and the keys and values of so many tokens."""
        return self.weights_bytes + self.kv_fixed_bytes + n_tokens * self.kv_bytes_per_token

    def n_tokens(self, memory_bytes: int) -> int:
        """Tokens of context for which there is room beside the weights."""
        room = int(memory_bytes * USABLE) - self.n_bytes(0)
        return max(0, min(self.n_context, room // self.kv_bytes_per_token))

    def fits(self, memory_bytes: int, n_tokens: int = 0) -> bool:
        """Whether with so many tokens, and a usual context."""
        return self.n_tokens(memory_bytes) >= max(n_tokens, min(LEAST_TOKENS, self.n_context))


class ModelMemory(NamedTuple):
    """The memory that models are to fit into."""

    n_bytes: int  # of memory that weights and caches share
    on_cpu: bool

    @classmethod
    def here(cls) -> ModelMemory:
        from keepwarm.device.memory import gpu_memory, host_memory, on_cpu  # loads MLX

        return cls(gpu_memory() or host_memory().total_bytes, on_cpu())

    def fitting(self, n_tokens: int = 0) -> list[ModelChoice]:
        """Models that fit with so many tokens, the largest first."""
        choices = [choice.in_fp32() if self.on_cpu else choice for choice in all_choices()]
        return [choice for choice in reversed(choices) if choice.fits(self.n_bytes, n_tokens)]


def all_choices() -> list[ModelChoice]:
    """Every model of the file that has a source, the smallest first."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    found = [
        ModelChoice(
            id=row["id"],
            licence=row["licence"],
            n_context=row["config"]["max_position_embeddings"],
            n_weights=row["n_weights"],
            weights_bytes=row["weights_bytes"],
            kv_bytes_per_token=row["kv_bytes_per_token"],
            kv_fixed_bytes=row["kv_fixed_bytes"],
            is_loaded=row["loaded"],
            sources=tuple(row["sources"]),
            read=row["read"],
        )
        for row in rows
        if row["sources"]
    ]
    return sorted(found, key=lambda choice: choice.weights_bytes)

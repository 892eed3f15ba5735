"""Models worth trying, by the memory that they need, and their figures, from their configs.

`model_choices.json` has a row for each, with its public sources, the day they were read, and the
config from which the figures are computed.

mlx-lm builds every model at its full size, but nothing is evaluated: shapes are enough for the
bytes of the weights, and one token is enough for the layout of the caches, whose bytes the
engine's own arithmetic gives. `python -m tests.kit.choices` writes the figures into the file.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model

from keepwarm.engine.admission import kv_bytes
from keepwarm.kv.layout import layout_of
from keepwarm.prefix.blocks import BLOCK_TOKENS

FILE = Path(__file__).parents[1] / "data" / "model_choices.json"
USABLE = 0.75  # of a machine's memory; the rest is for the system and other programs
LEAST_TOKENS = 16_384  # of context, or all of it: an agent's instructions and tools fill most
FAR = 1 << 20  # tokens: past every window


def figures(row):
    """Parameters, bytes of the weights, KV bytes per token, and KV bytes of any length."""
    module = _module(row["config"])
    n_weights = sum(array.size for _, array in tree_flatten(module.parameters()))
    if "bits" in row:
        wanted = {"group_size": row["group_size"], "bits": row["bits"]}
        predicate = getattr(module, "quant_predicate", None)
        module, _ = quantize_model(module, {}, **wanted, quant_predicate=predicate)
    arrays = [array for _, array in tree_flatten(module.parameters())]
    caches = make_prompt_cache(module)
    module(mx.array([[0]]), cache=caches)
    layout = layout_of(caches)
    block_bytes = kv_bytes(layout, FAR + BLOCK_TOKENS) - kv_bytes(layout, FAR)
    per_token, rest = divmod(block_bytes, BLOCK_TOKENS)
    assert rest == 0
    return {
        "n_weights": n_weights,
        "weights_bytes": sum(array.nbytes for array in arrays),
        "kv_bytes_per_token": per_token,
        "kv_fixed_bytes": kv_bytes(layout, FAR) - FAR * per_token,
    }


def _module(config):
    arch = import_module(f"mlx_lm.models.{config['model_type']}")
    module = arch.Model(arch.ModelArgs.from_dict(config))
    module.set_dtype(mx.bfloat16)
    return module


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

    def n_bytes(self, n_tokens: int) -> int:
        """Weights, and the keys and values of so many tokens."""
        return self.weights_bytes + self.kv_fixed_bytes + n_tokens * self.kv_bytes_per_token

    def n_tokens(self, memory_bytes: int) -> int:
        """Tokens of context for which there is room beside the weights."""
        room = int(memory_bytes * USABLE) - self.n_bytes(0)
        return max(0, min(self.n_context, room // self.kv_bytes_per_token))

    def fits(self, memory_bytes: int) -> bool:
        return self.n_tokens(memory_bytes) >= min(LEAST_TOKENS, self.n_context)


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


if __name__ == "__main__":
    rows = json.loads(FILE.read_text())
    FILE.write_text(json.dumps([row | figures(row) for row in rows], indent=2) + "\n")

"""Figures of the models in `src/keepwarm/models/choices.json`, from their configs.

mlx-lm builds every model at its full size, but nothing is evaluated: shapes are enough for the
bytes of the weights, and one token is enough for the layout of the caches, whose bytes the
engine's own arithmetic gives. `python -m tests.kit.choices` writes the figures into the file.
"""

import json
from importlib import import_module

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import quantize_model

from keepwarm.engine.admission import kv_bytes
from keepwarm.kv.layout import layout_of
from keepwarm.models.choices import FILE
from keepwarm.prefix.blocks import BLOCK_TOKENS

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


if __name__ == "__main__":
    rows = json.loads(FILE.read_text())
    FILE.write_text(json.dumps([row | figures(row) for row in rows], indent=2) + "\n")

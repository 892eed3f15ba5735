"""`python -m benchmarks.points`: what it costs to end slices where nothing is kept.

A hybrid model (three in four layers have a state as large as about a thousand rows) prefills a
conversation of short messages. Slices end either with whole blocks and at every message, where a
state is taken, or at the restore points alone. Both in turn, so that a busy machine slows down
both, and by processor time: rely on the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from statistics import median
from typing import Annotated, Any, NamedTuple

from keepwarm import kv, load  # noqa: F401 (before mlx, so that a fast BLAS can be loaded for it)

# isort: split
import mlx.core as mx
import typer
from mlx_lm.models import granitemoehybrid

from benchmarks.zoo.models import randomise
from keepwarm import blas, config
from keepwarm.cache.restore.manager import Manager
from keepwarm.cache.restore.points import restore_points
from keepwarm.cache.restore.reading import Reader
from keepwarm.cache.restore.writing import MemorySaver
from keepwarm.engine.prefill import Prefill
from keepwarm.kv.layout import probe
from keepwarm.prefix.blocks import Namespace
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers

N_LAYERS = 4
SHAPE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * (N_LAYERS // 4),
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_proj_bias": False,
    "position_embedding_type": "rope",
}


class Run(NamedTuple):
    seconds: float
    n_slices: int
    n_states: int  # that were taken


def prefill(
    module: Any,
    layout: kv.Layout,
    tokens: list[int],
    n_slice: int,
    points: Collection[int],
    *,
    whole_blocks: bool,
) -> Run:
    """Prefill and keep a prompt, as the engine does."""
    tier = MemoryTier(8 << 30)
    tiers = Tiers([("memory", tier)])
    name = Namespace(bytes(32))
    manager = Manager(name, layout, tiers, Reader(tiers, n_threads=1), MemorySaver(tier))
    capture, n_slices = manager.open(tokens), 0
    began = time.process_time()
    caches = kv.make_caches(module)
    task = Prefill(module, tokens, caches, 0, points=points, whole_blocks=whole_blocks)
    while task.n_done < len(tokens):
        task.feed(n_slice)
        capture.capture(task.caches, task.n_done, checkpoint=task.is_at_point)
        n_slices += 1
    seconds = time.process_time() - began
    manager.reader.close()
    tier.close()
    return Run(seconds, n_slices, len(points))


def main(
    n_tokens: Annotated[int, typer.Option("--tokens", help="Of the prompt.")] = 3000,
    message: Annotated[int, typer.Option("--message", help="Tokens of each message.")] = 90,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Of every measurement.")] = 3,
) -> None:
    """Prefill a hybrid model in slices that end everywhere, and in slices that end at points."""
    blas.start(config.load().home)
    module = granitemoehybrid.Model(granitemoehybrid.ModelArgs.from_dict(SHAPE))
    randomise(module)
    layout = probe(module, kv.make_caches(module))
    tokens = [int(n) for n in mx.random.randint(0, 1024, (n_tokens,), key=mx.random.key(0))]
    cuts = range(message, n_tokens - 1, message)
    everywhere = {*cuts, n_tokens - 1}
    chosen = restore_points(layout, n_tokens, cuts)
    for n_slice in (96, 512):
        runs: dict[str, list[Run]] = {"everywhere": [], "points": []}
        for _ in range(repeats + 1):
            runs["everywhere"].append(
                prefill(module, layout, tokens, n_slice, everywhere, whole_blocks=True)
            )
            runs["points"].append(
                prefill(module, layout, tokens, n_slice, chosen, whole_blocks=False)
            )
        before, after = (some[1:] for some in runs.values())  # the first warms up
        for ends, some in runs.items():
            seconds = median(run.seconds for run in some[1:])
            print(
                f"slices of {n_slice}, ends {ends:<10} {some[0].n_slices:>4} slices "
                f"{some[0].n_states:>4} states {seconds:8.2f} s"
            )
        ratio = median(b.seconds / a.seconds for b, a in zip(before, after, strict=True))
        print(f"slices of {n_slice}: everywhere takes {ratio:.2f} times as long")


if __name__ == "__main__":
    typer.run(main)

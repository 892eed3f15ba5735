"""KV caches: every cache class of mlx-lm sliced, saved, restored and batched.

Code that knows mlx-lm's cache classes belongs here; files and conversations do not.

Imports `prefix`, `records`.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)
from keepwarm.kv.assembly import (
    Assembly,
    concatenate_cache_blocks,
    create_cache_from_state,
    reconstruct_cache,
    slab_sizes,
)
from keepwarm.kv.batch import (
    LeftPadding,
    Padding,
    RightPadding,
    States,
    TwoSidedPadding,
    batch_size,
    can_batch,
    empty_batch,
    extend,
    extract,
    filter_rows,
    finalize,
    merge,
    prepare,
    states_of,
    trim,
)
from keepwarm.kv.buffers import dynamic_roll
from keepwarm.kv.codec import (
    EncodedCache,
    copy_caches,
    decode,
    detached,
    encode,
    evaluate,
    held_bytes,
    live_bytes,
)
from keepwarm.kv.kinds import Caches, Kind, kind_of, token_count
from keepwarm.kv.layout import Layout, Probe, layout_of, probe, run_probe
from keepwarm.kv.make import make_caches
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache, quantize_caches
from keepwarm.kv.slices import Block, cut_blocks

__all__ = [
    "Assembly",
    "BatchQuantizedKVCache",
    "Block",
    "Caches",
    "EncodedCache",
    "Kind",
    "Layout",
    "LeftPadding",
    "Padding",
    "Probe",
    "QuantKVCache",
    "RightPadding",
    "States",
    "TwoSidedPadding",
    "batch_size",
    "can_batch",
    "concatenate_cache_blocks",
    "copy_caches",
    "create_cache_from_state",
    "cut_blocks",
    "decode",
    "detached",
    "dynamic_roll",
    "empty_batch",
    "encode",
    "evaluate",
    "extend",
    "extract",
    "filter_rows",
    "finalize",
    "held_bytes",
    "kind_of",
    "layout_of",
    "live_bytes",
    "make_caches",
    "merge",
    "prepare",
    "probe",
    "quantize_caches",
    "reconstruct_cache",
    "run_probe",
    "slab_sizes",
    "states_of",
    "token_count",
    "trim",
]

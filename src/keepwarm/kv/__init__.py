"""What a KV cache is: every cache class of mlx-lm sliced, saved, restored and batched.

Code that knows mlx-lm's cache classes belongs here; files and conversations do not.

Imports `prefix`.
"""

from keepwarm import blas, config

blas.preload(config.load().home)

from keepwarm.kv.assembly import (  # noqa: E402
    Assembly,
    concatenate_cache_blocks,
    create_cache_from_state,
    reconstruct_cache,
)
from keepwarm.kv.batch import (  # noqa: E402
    Both,
    Left,
    Padding,
    Right,
    batch_size,
    can_batch,
    dynamic_roll,
    empty_batch,
    extend,
    extract,
    filter_rows,
    finalize,
    merge,
    prepare,
    trim,
)
from keepwarm.kv.codec import Encoded, copy_of, decode, encode, evaluate, live_bytes  # noqa: E402
from keepwarm.kv.kinds import Caches, Kind, kind_of, token_count  # noqa: E402
from keepwarm.kv.layout import Layout, layout_of, probe  # noqa: E402
from keepwarm.kv.make import make_caches  # noqa: E402
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache, quantized  # noqa: E402
from keepwarm.kv.slices import Block, cut  # noqa: E402
from keepwarm.kv.staging import Staging  # noqa: E402

__all__ = [
    "Assembly",
    "BatchQuantizedKVCache",
    "Block",
    "Both",
    "Caches",
    "Encoded",
    "Kind",
    "Layout",
    "Left",
    "Padding",
    "QuantKVCache",
    "Right",
    "Staging",
    "batch_size",
    "can_batch",
    "concatenate_cache_blocks",
    "copy_of",
    "create_cache_from_state",
    "cut",
    "decode",
    "dynamic_roll",
    "empty_batch",
    "encode",
    "evaluate",
    "extend",
    "extract",
    "filter_rows",
    "finalize",
    "kind_of",
    "layout_of",
    "live_bytes",
    "make_caches",
    "merge",
    "prepare",
    "probe",
    "quantized",
    "reconstruct_cache",
    "token_count",
    "trim",
]

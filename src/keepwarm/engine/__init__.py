"""The thread that owns MLX: which requests run when, prefill, decode, keeping the results.

Imports `cache`, `device`, `engine.insight`, `kv`, `models`, `prefix`, `store`, `text`.
"""

from keepwarm import blas, config

blas.preload(config.load().home)

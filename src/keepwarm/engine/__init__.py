"""The thread that owns MLX: which requests run when, prefill, decode, keeping the results.

Imports `cache`, `device`, `engine.insight`, `kv`, `models`, `prefix`, `store`, `text`.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

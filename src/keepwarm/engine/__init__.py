"""The thread that owns MLX: which requests run when, prefill, decode, keeping the results.

Imports `agents`, `cache`, `device`, `kv`, `models`, `prefix`, `records`, `store`, `telemetry`,
`text`.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

"""`keepwarm bench`: whole requests to servers and to the engine, measured side by side.

Imports `bench.report`, `bench.workloads`, `cache`, `device`, `engine`, `models`, `prefix`, `text`.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

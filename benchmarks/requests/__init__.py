"""Whole requests to servers and to the engine, measured side by side."""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

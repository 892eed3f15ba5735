"""This machine: memory, memory pressure, processor and GPU, disk space.

Imports the ground floor.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

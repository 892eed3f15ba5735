"""What single operations cost: slicing, saving, restoring, batching, the index, eviction.

`python -m benchmarks` in a checkout runs them; no wheel holds them. Speeds are compared within one
run only, as ratios.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

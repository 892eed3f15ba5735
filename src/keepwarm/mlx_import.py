"""Imports `mlx.core` so that it binds its BLAS at the first matrix product, not at import.

Python loads extension modules with all symbols bound at once. Bound lazily, MLX takes whichever
BLAS the process has by then, so `keepwarm.blas.start` may come after the import. Every room that
imports MLX imports this module first, in its `__init__`.
"""

import os
import sys

BOUND_EARLY = "mlx.core" in sys.modules  # imported by someone else before us, and bound for good

if sys.platform == "linux":
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        import mlx.core
    finally:
        sys.setdlopenflags(flags)
else:
    import mlx.core

__all__ = ["BOUND_EARLY", "mlx"]

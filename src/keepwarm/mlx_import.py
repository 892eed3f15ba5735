"""Imports `mlx.core` so that it binds its BLAS at the first matrix product, not at import.

Python loads extension modules with all symbols bound at once. Bound lazily, MLX takes whichever
BLAS the process has by then, so `keepwarm.blas.start` may come after the import. Every room that
imports MLX imports this module first, in its `__init__`. A missing build of MLX is one sentence.
"""

import os
import sys

from keepwarm import backend

BOUND_EARLY = "mlx.core" in sys.modules  # imported by someone else before us, and bound for good

flags = sys.getdlopenflags()
backend.check()
try:
    if sys.platform == "linux":
        sys.setdlopenflags(os.RTLD_LAZY)
    import mlx.core
except ImportError as error:
    raise backend.explain(error) from error
finally:
    sys.setdlopenflags(flags)

__all__ = ["BOUND_EARLY", "mlx"]

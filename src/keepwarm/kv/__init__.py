"""What a KV cache is: every class of mlx-lm sliced, saved, restored and batched.

The BLAS that MLX will use is fixed by the first import of `mlx.core`, so the fast one comes first.
"""

from keepwarm import blas, config

blas.preload(config.load().home)

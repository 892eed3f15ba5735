"""What runs the model. The fast BLAS comes before MLX, as in `keepwarm.kv`."""

from keepwarm import blas, config

blas.preload(config.load().home)

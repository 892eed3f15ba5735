"""What the KV-cache library costs, measured: workloads, a runner, a report.

`python -m keepwarm.bench` runs it. Speeds are compared within one run only, as ratios. The BLAS
that MLX will use is fixed by the first import of `mlx.core`, so the fast one comes first.
"""

from keepwarm import blas, config

blas.preload(config.load().home)

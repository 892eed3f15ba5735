"""What this machine is and has: memory, memory pressure, processor and GPU, disk space.

Imports the ground floor.
"""

from keepwarm import blas, config

blas.preload(config.load().home)

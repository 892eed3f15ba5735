"""From a model's name to its weights and tokenizer in memory.

Imports `device`, `models.gguf`.
"""

from keepwarm import blas, config

blas.preload(config.load().home)

"""From a model's name to its weights and tokenizer in memory.

Imports `device`, `models.gguf`.
"""

from keepwarm import mlx_import  # noqa: F401 (before MLX)

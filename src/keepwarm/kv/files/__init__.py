"""Prompt-cache files: all formats of mlx-lm and mlx-swift-lm are read, mlx-lm's is written.

Imports `kv`.
"""

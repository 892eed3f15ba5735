"""Prompt-cache files of mlx-lm and mlx-swift-lm, read and written in all their layouts.

Imports `kv`.
"""

"""Where records live: bytes with keys, in memory and on disk, never an array or a model.

Imports `prefix`, `store.index`.
"""

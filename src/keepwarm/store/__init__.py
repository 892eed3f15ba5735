"""Records, bytes with keys, in memory and on disk; no arrays and no models.

Imports `prefix`, `records`.
"""

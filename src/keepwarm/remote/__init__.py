"""Stores that machines share: backends, look-ups, uploads, deletions, health, compression.

Imports `device`, `prefix`, `records`, `store`.
"""

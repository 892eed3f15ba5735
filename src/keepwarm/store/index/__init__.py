"""The SQLite index: which records exist, their eviction priorities and pins.

Imports `prefix`, `records`, `store`.
"""

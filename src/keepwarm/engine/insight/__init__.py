"""Observing the engine: statistics, recent requests, misses, audits, what-if.

In `engine` only `engine.engine` imports it.
Imports `cache`, `engine`, `prefix`, `store`, `text`.
"""

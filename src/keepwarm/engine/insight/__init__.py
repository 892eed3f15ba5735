"""Observing the engine: statistics, recent requests, misses, audits, what-if.

In `engine` only `engine.engine` imports it.
Imports `cache`, `device`, `engine`, `prefix`, `store`, `text`.
"""

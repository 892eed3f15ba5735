"""What has happened in the engine: counters, recent requests, misses, audits, what-if.

Imports `cache`, `engine`, `prefix`, `store`, `text`.
"""

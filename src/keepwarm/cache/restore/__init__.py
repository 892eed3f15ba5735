"""Planning, loading and saving the KV state of one prompt.

Imports `cache`, `cache.agents`, `cache.shared`, `kv`, `prefix`, `store`.
"""

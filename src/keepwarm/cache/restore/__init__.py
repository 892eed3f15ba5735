"""Planning, loading and saving the KV state of one prompt.

Imports `cache`, `cache.agents`, `kv`, `prefix`, `remote`, `store`.
"""

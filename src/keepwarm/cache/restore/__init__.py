"""Planning, loading and saving the KV state of one prompt.

Imports `cache`, `kv`, `prefix`, `store`.
"""

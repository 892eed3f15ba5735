"""Planning, loading and saving the KV state of one prompt.

Imports `agents`, `kv`, `prefix`, `records`, `remote`, `store`.
"""

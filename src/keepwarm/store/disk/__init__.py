"""Record files in a directory: published, verified, evicted, checked and repaired.

Imports `prefix`, `store`, `store.index`.
"""

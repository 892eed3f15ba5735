"""The disk tier: record files published, verified, evicted and repaired.

Imports `prefix`, `store`, `store.index`.
"""

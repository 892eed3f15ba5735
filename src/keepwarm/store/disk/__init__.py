"""The disk tier: record files published, verified, evicted and repaired.

Imports `prefix`, `records`, `store`, `store.index`.
"""

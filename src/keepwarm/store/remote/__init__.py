"""A tier over a place that machines share; it may be slow, stale, full or gone.

Imports `prefix`, `store`, `store.blobs`.
"""

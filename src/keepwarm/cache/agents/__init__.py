"""Named conversations: their records, pins, bundles, and the tree of all blocks.

Imports `cache.shared`, `cache.texts`, `prefix`, `store`.
"""

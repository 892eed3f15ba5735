"""Named conversations: their records, pins, bundles, and the tree of all blocks.

Imports `cache.texts`, `prefix`, `store`.
"""

"""Named conversations: their records, pins, bundles, and the tree of all blocks.

Imports `prefix`, `store`.
"""

"""Named conversations: branches, messages, pins, quota, bundles, and the store that keeps them.

They need no MLX, so that the command line starts quickly.

Imports `prefix`, `records`, `remote`, `store`.
"""

"""What was done: one record of every request that ended, and what all of them add up to.

Imports `prefix`, `store`, `text`.
"""

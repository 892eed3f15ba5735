"""The SQLite index: which records exist, what they are worth, and who pins them.

Imports `prefix`, `store`.
"""

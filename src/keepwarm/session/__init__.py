"""`Session`, the library's conversation: turns, rounds of tool calls, one turn at a time.

Imports `engine`, `prefix`, `store`, `text`.
"""

"""`Session`, the library's conversation: turns, rounds of tool calls, one turn at a time.

Imports `cache`, `engine`, `prefix`, `text`.
"""

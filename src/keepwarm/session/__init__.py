"""The library's conversation: turns, tool calls, one turn at a time.

Imports `cache`, `engine`, `text`.
"""

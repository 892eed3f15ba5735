"""The dashboard: its page, and the JSON that the page reads.

Imports `cache`, `engine`, `prefix`, `server`, `server.http`, `server.openai`, `store`, `text`.
"""

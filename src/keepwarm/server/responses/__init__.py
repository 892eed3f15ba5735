"""OpenAI's responses.

Imports `cache.texts`, `engine`, `server`, `server.http`, `server.openai`, `text`.
"""

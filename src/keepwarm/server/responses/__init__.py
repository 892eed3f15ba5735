"""OpenAI's responses.

Imports `engine`, `server`, `server.http`, `server.openai`, `text`.
"""

"""OpenAI's chat completions and text completions.

Imports `engine`, `server`, `server.http`, `text`.
"""

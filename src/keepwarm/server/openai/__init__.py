"""OpenAI's chat completions and text completions.

Imports `engine`, `prefix`, `server.http`, `server.models`, `text`.
"""

"""OpenAI's chat completions and text completions.

Imports `engine`, `prefix`, `server`, `server.http`, `server.models`, `text`.
"""

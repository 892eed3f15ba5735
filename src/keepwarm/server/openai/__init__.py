"""OpenAI's chat completions and text completions.

Imports `cache`, `engine`, `server`, `server.http`, `server.models`, `text`.
"""

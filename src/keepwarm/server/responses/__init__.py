"""OpenAI's responses.

Imports `agents`, `cache`, `cache.restore`, `server.http`, `server.models`, `server.openai`,
`session`, `text`.
"""

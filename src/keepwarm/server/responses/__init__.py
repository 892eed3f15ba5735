"""OpenAI's responses.

Imports `agents`, `cache`, `cache.restore`, `server`, `server.http`, `server.openai`, `session`,
`text`.
"""

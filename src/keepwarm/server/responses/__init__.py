"""OpenAI's responses.

Imports `cache`, `cache.restore`, `cache.texts`, `server`, `server.http`,
`server.openai`, `session`, `text`.
"""

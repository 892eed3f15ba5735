"""OpenAI's responses.

Imports `cache`, `cache.restore`, `cache.texts`, `engine`, `server`, `server.http`,
`server.openai`, `session`, `text`.
"""

"""The management API: agents, the cache, the model, health and metrics.

Imports `agents`, `cache`, `engine`, `models`, `prefix`, `server.anthropic`, `server.http`,
`server.models`, `server.openai`, `server.responses`, `session`, `store`, `text`.
"""

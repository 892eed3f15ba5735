"""The HTTP server: its process, its application, and the engine of a model.

Imports `agents`, `cache`, `device`, `engine`, `models`, `prefix`, `server.admin`,
`server.anthropic`, `server.dashboard`, `server.events`, `server.http`, `server.mcp`,
`server.models`, `server.ollama`, `server.openai`, `server.responses`, `store`, `text`.
"""

"""The HTTP server: its process, its application, and the engine it serves.

Imports `cache`, `engine`, `models`, `server.anthropic`, `server.dashboard`, `server.http`,
`server.manage`, `server.openai`, `server.responses`, `text`.
"""

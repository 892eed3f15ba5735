"""The HTTP server: its process, its application, KV events, and MCP.

Imports `agents`, `cache`, `engine`, `models`, `prefix`, `records`, `server.admin`,
`server.anthropic`, `server.dashboard`, `server.http`, `server.models`, `server.ollama`,
`server.openai`, `server.responses`, `store`.
"""

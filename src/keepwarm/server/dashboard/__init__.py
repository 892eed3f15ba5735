"""The dashboard: its page, and the JSON it shows.

Imports `agents`, `device`, `engine`, `models`, `prefix`, `server.admin`, `server.http`,
`server.models`, `server.ollama`, `store`, `telemetry`, `text`.
"""

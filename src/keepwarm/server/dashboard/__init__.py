"""The dashboard: its page, and the JSON it shows.

Imports `agents`, `cache`, `engine`, `prefix`, `server`, `server.http`, `server.manage`,
`server.models`, `server.openai`, `store`, `telemetry`, `text`.
"""

"""The dashboard: its page, and the JSON it shows.

Imports `cache`, `engine`, `prefix`, `server`, `server.http`, `server.manage`, `server.models`,
`server.openai`, `store`, `telemetry`, `text`.
"""

"""The dashboard: its page, and the JSON it shows.

Imports `agents`, `cache`, `engine`, `prefix`, `server`, `server.http`, `server.manage`,
`server.models`, `store`, `telemetry`, `text`.
"""

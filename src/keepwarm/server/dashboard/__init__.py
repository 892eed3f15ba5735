"""The dashboard: its page, and the JSON it shows.

Imports `agents`, `cache`, `engine`, `prefix`, `server.admin`, `server.http`,
`server.models`, `store`, `telemetry`, `text`.
"""

"""Which models a server has: their names, the engines of those that are loaded, who uses them.

Imports `cache`, `device`, `engine`, `models`, `server`, `server.http`,
`telemetry`, `text`.
"""

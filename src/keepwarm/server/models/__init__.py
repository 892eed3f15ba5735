"""Which models a server has: names, engines, leases; and what is asked of one on its way there.

Imports `agents`, `cache`, `device`, `engine`, `models`, `prefix`, `server.http`, `telemetry`,
`text`.
"""

"""MCP: an agent looks at its own memory here, and manages it.

Imports `server.dashboard`, `server.http`, `server.admin`, `server.models`.
"""

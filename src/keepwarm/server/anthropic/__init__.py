"""Anthropic's messages.

Imports `server.http`, `server.models`, `text`.
"""

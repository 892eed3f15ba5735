"""Anthropic's messages.

Imports `server`, `server.http`, `text`.
"""

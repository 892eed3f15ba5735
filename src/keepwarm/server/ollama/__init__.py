"""Ollama's API.

Imports `engine`, `models`, `server`, `server.http`, `server.models`, `server.openai`, `text`.
"""

"""Ollama's API.

Imports `engine`, `models`, `server.http`, `server.models`, `server.openai`, `text`.
"""

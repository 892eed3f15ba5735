"""Ollama's API, and what clients of llama.cpp's server ask for.

Imports `engine`, `models`, `prefix`, `server`, `server.http`, `server.models`, `server.openai`,
`telemetry`, `text`.
"""

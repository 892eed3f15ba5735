"""Agents, the cache, the model, health and metrics: what operators and scripts call.

Imports `cache`, `engine`, `models`, `prefix`, `server`, `server.anthropic`, `server.http`,
`server.openai`, `server.responses`, `store`, `text`.
"""

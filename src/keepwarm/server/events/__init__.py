"""KV events over ZMQ, in vLLM's schema: which whole blocks this server has.

Imports `cache`, `engine`, `prefix`, `records`, `server.models`, `store`.
"""

"""What is kept of agents in words, beside their blocks: messages, and responses of the server.

Imports `prefix`, `store`.
"""

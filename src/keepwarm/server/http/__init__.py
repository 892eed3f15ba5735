"""What all APIs share: bodies, limits, errors, streams, receipts, logs, scrubbing.

Imports `engine`, `prefix`, `server`, `server.models`, `text`.
"""

"""What all APIs share: bodies, limits, errors, streams, receipts, logs, scrubbing.

Imports `prefix`, `server`, `server.models`, `text`.
"""

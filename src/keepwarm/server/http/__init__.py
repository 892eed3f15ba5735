"""What all APIs share: bodies, limits, errors, streams, receipts, logs, scrubbing.

Imports `cache`, `server`, `server.models`, `text`.
"""

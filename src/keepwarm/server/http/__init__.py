"""What all APIs share: bodies, keys, limits, permits, errors, streams, receipts, logs.

Imports `cache`, `engine`, `prefix`, `store`, `telemetry`, `text`.
"""

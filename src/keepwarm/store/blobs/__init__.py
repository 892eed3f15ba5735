"""Where machines share records: bytes with names, in Redis, in S3 or in a directory.

Imports the ground floor.
"""

"""Where machines share records: bytes with names, in Redis or in a directory.

Imports the ground floor.
"""

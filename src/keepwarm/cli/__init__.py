"""The command line: one verb, one file.

Imports `bench`, `cache`, `device`, `engine`, `models`, `server`, `store`, `text`.
"""

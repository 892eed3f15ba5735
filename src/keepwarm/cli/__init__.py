"""The command line: one verb, one file.

Imports `bench`, `cache`, `device`, `engine`, `models`, `prefix`, `server`, `store`, `text`.
"""

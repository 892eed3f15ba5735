"""The command line: one verb, one file.

Imports `cache`, `device`, `engine`, `models`, `prefix`, `remote`, `server`, `store`, `text`.
"""

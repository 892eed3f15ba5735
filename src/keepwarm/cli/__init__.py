"""The command line: one verb, one file.

Imports `agents`, `cache`, `device`, `engine`, `kv`, `models`, `prefix`, `remote`, `server`,
`store`, `text`.
"""

"""Where prompts meet records: the block store that the engine and library users open.

Imports `agents`, `cache.restore`, `device`, `kv`, `models`, `prefix`, `records`, `remote`, `store`.
"""

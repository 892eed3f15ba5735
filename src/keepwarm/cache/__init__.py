"""Where prompts meet records: the block store that the engine and library users open.

Imports `cache.agents`, `cache.restore`, `cache.texts`, `device`, `kv`, `models`,
`prefix`, `remote`, `store`.
"""

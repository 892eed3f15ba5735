"""Before the first requests: kernels are compiled, likely conversations are loaded.

Imports `cache`, `device`, `engine`, `models`, `prefix`, `store`, `text`.
"""

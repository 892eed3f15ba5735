"""Parts of rendering a prompt: text to tokens with boundaries, conversations that are continued.

Imports `cache.texts`, `prefix`, `text`, `text.bounds`.
"""

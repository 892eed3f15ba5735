"""Parts of rendering a prompt: text to tokens with boundaries, conversations that are continued.

Imports `prefix`, `text`, `text.bounds`.
"""

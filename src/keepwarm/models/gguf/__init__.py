"""GGUF files: format, weights, tokenizer.

Imports `device`.
"""

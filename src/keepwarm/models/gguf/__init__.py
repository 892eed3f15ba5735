"""GGUF files: their container, their weights, their tokenizer.

Imports `device`.
"""

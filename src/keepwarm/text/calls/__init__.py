"""Tool calls while a model still writes them.

Imports `text`.
"""

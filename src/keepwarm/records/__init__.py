"""The file format of a block: header, tensors, digests, encryption.

Imports `prefix`.
"""

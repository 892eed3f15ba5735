"""What a prompt is: tokens, blocks, their keys. Pure functions and values only: no MLX, no I/O.

Imports the ground floor.
"""

"""Small models that copy, find and call tools, trained in minutes on one CUDA GPU.

Imports inside this folder are relative: where neither Keepwarm nor MLX is installed, it runs as
`python3 -m training` in a folder that has a link to it. Only `check` needs MLX.
"""

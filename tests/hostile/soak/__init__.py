"""The soak: mixed requests and attacks on real servers that are killed; nothing may be wrong.

python -m tests.hostile.soak --requests 10000 --kills 24 --json docs/results/soak.json
"""

"""Random trees of conversations, through restarts, damage and eviction: every answer is a cold one.

python -m tests.hostile.conversations --requests 2000 --json docs/results/conversations.json
"""

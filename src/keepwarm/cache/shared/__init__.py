"""Tiers that machines share, opened from the settings, and what is written to them.

Imports `device`, `prefix`, `store`.
"""

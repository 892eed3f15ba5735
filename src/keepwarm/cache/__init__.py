"""Joins what a cache is with where bytes live: look up, restore, capture."""

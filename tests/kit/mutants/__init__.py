"""Mutants of files that strangers hand over, and the program that has them read."""

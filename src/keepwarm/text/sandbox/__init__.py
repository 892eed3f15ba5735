"""Work in a process of its own, with limits of time and memory: it can be ended at any time.

Imports the ground floor.
"""

"""What preparing a request may cost: sizes, a deadline, and a process that can be ended.

Imports `prefix`, `text`, `text.rendering`.
"""

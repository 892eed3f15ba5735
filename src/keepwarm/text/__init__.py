"""Messages to tokens and tokens to text, tools, grammars, sampling rules; no device work.

Imports `models`, `prefix`, `text.sandbox`.
"""

"""Local LLM agents that never compute the same prompt twice."""

__version__ = "0.1.0.dev0"

"""Local LLM agents that never compute the same prompt twice."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepwarm.engine.model import load
    from keepwarm.engine.store import Store

__version__ = "0.1.0.dev0"

__all__ = ["Store", "__version__", "load"]

# Looked up on first use: `import keepwarm` and `keepwarm --help` must not wait for MLX.
_HOMES = {"Store": "keepwarm.engine.store", "load": "keepwarm.engine.model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

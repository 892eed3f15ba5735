"""Local LLM agents that never compute the same prompt twice."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepwarm.cache.policy import Policy
    from keepwarm.engine.engine import Engine, EngineConfig
    from keepwarm.engine.model import load
    from keepwarm.engine.request import Format, KVOptions, Request, Sampling, ToolChoice
    from keepwarm.engine.session import Session
    from keepwarm.engine.store import Store

__version__ = "0.1.0.dev0"

__all__ = [
    "Engine",
    "EngineConfig",
    "Format",
    "KVOptions",
    "Policy",
    "Request",
    "Sampling",
    "Session",
    "Store",
    "ToolChoice",
    "__version__",
    "load",
]

# Looked up on first use: `import keepwarm` and `keepwarm --help` must not wait for MLX.
_HOMES = {
    "Engine": "keepwarm.engine.engine",
    "EngineConfig": "keepwarm.engine.engine",
    "Format": "keepwarm.engine.request",
    "KVOptions": "keepwarm.engine.request",
    "Policy": "keepwarm.cache.policy",
    "Request": "keepwarm.engine.request",
    "Sampling": "keepwarm.engine.request",
    "Session": "keepwarm.engine.session",
    "Store": "keepwarm.engine.store",
    "ToolChoice": "keepwarm.engine.request",
    "load": "keepwarm.engine.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

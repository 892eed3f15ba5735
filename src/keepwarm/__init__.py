"""Local LLM agents that never compute the same prompt twice."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepwarm.cache.policy import Policy
    from keepwarm.cache.store import Store
    from keepwarm.engine.engine import Engine, EngineConfig
    from keepwarm.models.load import load
    from keepwarm.session.session import Session
    from keepwarm.text.request import Format, KVOptions, Request, Sampling, ToolChoice

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
    "Format": "keepwarm.text.request",
    "KVOptions": "keepwarm.text.request",
    "Policy": "keepwarm.cache.policy",
    "Request": "keepwarm.text.request",
    "Sampling": "keepwarm.text.request",
    "Session": "keepwarm.session.session",
    "Store": "keepwarm.cache.store",
    "ToolChoice": "keepwarm.text.request",
    "load": "keepwarm.models.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

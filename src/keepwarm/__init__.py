"""Local LLM agents that never compute the same prompt twice.

The names in `__all__` are the public API, with their types in `__init__.pyi`. All other modules are
internal and may change, but for `keepwarm.kv`, which is documented too.
"""

from importlib import import_module

__version__ = "0.1.0.dev0"

# Imported on first use: `import keepwarm` and `keepwarm --help` must not wait for MLX.
_HOMES = {
    "keepwarm.cache.store": "AgentBlocks AttachedModel Budgets Store",
    "keepwarm.config": "Settings",
    "keepwarm.device.memory": "MemoryConfig",
    "keepwarm.engine.admission": "EngineConfig",
    "keepwarm.engine.answer": "Answer",
    "keepwarm.engine.engine": "Engine",
    "keepwarm.engine.warm": "Warmer",
    "keepwarm.errors": (
        "BadCacheFile BadInput BadModelFile BadRecord Busy CacheError CacheMismatch Cancelled "
        "ContextTooLong CorruptBlock EngineFailed InsufficientResources KeepwarmError NewerFormat "
        "NoBackend Refused RepeatedToolCall Stopping StoreFailed TimedOut TooLarge UnknownAgent "
        "UnknownModel Unreachable UnsupportedCache UnsupportedModel WrongDigest"
    ),
    "keepwarm.kv.files.dialects": "Dialect",
    "keepwarm.kv.files.prompt_cache": "PromptCacheFile export_prompt_cache import_prompt_cache",
    "keepwarm.models.load": "Model load",
    "keepwarm.prefix.policy": "Policy",
    "keepwarm.session.compaction": "Compacted",
    "keepwarm.session.session": "Reply Session Stream ToolResult forget",
    "keepwarm.text.request": (
        "Breakpoint Choice Delta Done Embedded Event Finished Format KVOptions Miss Progress "
        "Receipt Request Result Sampling Scored Started TokenInfo ToolCall ToolCallDelta "
        "ToolCalled ToolChoice TopLogprob Usage"
    ),
}

__all__ = sorted(["__version__", *(name for names in _HOMES.values() for name in names.split())])  # noqa: PLE0605


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""What `run` and `chat` are asked alike, and how the answers are checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from keepwarm import config
from keepwarm.errors import BadInput

if TYPE_CHECKING:
    from keepwarm.engine.generate import LiveCache
    from keepwarm.engine.model import Model

ModelName: TypeAlias = Annotated[
    str | None, typer.Option("--model", help="Alias, directory, .gguf file or hub id.")
]
SystemFile: TypeAlias = Annotated[
    Path | None, typer.Option("--system", help="File that holds the system prompt.")
]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-tokens", help="Longest answer, in tokens.")
]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option("--temperature", help="0 takes the best token, more draws.")
]
Seed: TypeAlias = Annotated[
    int | None, typer.Option("--seed", help="Makes the draws of a temperature repeatable.")
]
KVBits: TypeAlias = Annotated[
    int | None, typer.Option("--kv-bits", help="Round keys and values to 2, 4 or 8 bits.")
]
AgentId: TypeAlias = Annotated[
    str | None, typer.Option("--agent", help="Keep what is said under this agent's name.")
]
NoCache: TypeAlias = Annotated[
    bool, typer.Option("--no-cache", help="Neither look up nor keep blocks.")
]


def settings_for(
    model: str | None, max_tokens: int | None, temperature: float | None, seed: int | None
) -> config.Settings:
    """The settings with these arguments on top; numbers that mean nothing are refused."""
    from keepwarm.engine.generate import check_options

    settings = config.load(model=model, max_tokens=max_tokens, temperature=temperature)
    check_options(settings.max_tokens, settings.temperature, seed)
    return settings


@contextmanager
def live_cache(
    model: Model,
    settings: config.Settings,
    kv_bits: int | None,
    no_cache: bool,
    agent: str | None,
) -> Iterator[LiveCache]:
    """The caches of a conversation, backed by the block store; leaving saves what is queued."""
    from keepwarm import kv
    from keepwarm.engine.generate import LiveCache
    from keepwarm.engine.store import Store

    kv_options: dict[str, Any] = {} if kv_bits is None else {"kv_bits": kv_bits}
    if no_cache:
        if agent is not None:
            raise BadInput("--agent and --no-cache cannot be combined: an agent is what is kept.")
        kv.probe(model.module, kv.make_caches(model.module, **kv_options))
        yield LiveCache(model, kv_options=kv_options)
        return
    with Store(settings=settings) as store:
        attached = store.attach(model.module, model.path, **kv_options)
        if agent is not None:
            store.shelf.agents.check_id(agent)
        cache = LiveCache(model, attached.manager, kv_options)
        yield cache
        if agent is not None and cache.tokens:
            store.flush()
            store.shelf.agents.advance(agent, attached.manager.namespace, cache.tokens)


def opening(system: Path | None) -> list[dict[str, str]]:
    """The messages that a conversation starts with: the system prompt, or none."""
    if system is None:
        return []
    try:
        content = system.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"The system prompt {system} is not UTF-8 text; convert it.") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"The system prompt {system} cannot be read: {why}.") from error
    return [{"role": "system", "content": content}]


def checked(text: str) -> str:
    """The text as it is, if it says anything and is Unicode; else refused in a sentence."""
    if not text.strip():
        raise BadInput("The prompt is empty; say something.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput("The prompt is not UTF-8 text; convert it.") from error
    return text

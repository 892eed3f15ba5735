"""What each client must be told so that it talks to this server: environment and arguments.

The names are those of the published packages: claude 2.1, codex 0.166, opencode 1.18, aider 0.86.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

KEY_VARIABLE = "KEEPWARM_API_KEY"  # where the clients that can be told a name find the key
NO_KEY = "keepwarm"  # clients refuse to start with none, and a server without keys takes any


@dataclass(frozen=True)
class Served:
    """A running server, as a client must know it."""

    url: str  # without /v1
    model: str
    n_context: int
    key: str = field(default=NO_KEY, repr=False)

    @property
    def n_answer(self) -> int:
        """Tokens to leave free for an answer; clients made for larger models ask for more."""
        return self.n_context // 4


@dataclass(frozen=True)
class Setup:
    """How to start a client. `secrets` are variables too, kept off the screen."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    cleared: tuple[str, ...] = ()  # variables that would lead the client elsewhere


SetUp: TypeAlias = Callable[[Served], Setup]


def claude(served: Served) -> Setup:
    """Claude Code. Every tier of model it knows is the one that is served."""
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    return Setup(
        ("claude",),
        {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_MODEL": served.model,
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": served.model for tier in tiers},
            "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.n_context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.n_answer),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        {"ANTHROPIC_AUTH_TOKEN": served.key},
        ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def codex(served: Served) -> Setup:
    """Codex: a provider of its own, named on the command line; no file is written."""
    provider = {
        "name": "Keepwarm",
        "base_url": f"{served.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
    }
    options: dict[str, str | int] = {
        "model": served.model,
        "model_provider": "keepwarm",
        "model_context_window": served.n_context,
        **{f"model_providers.keepwarm.{name}": value for name, value in provider.items()},
    }
    arguments = [part for name, value in options.items() for part in ("-c", _toml(name, value))]
    return Setup(("codex", *arguments), {}, {KEY_VARIABLE: served.key})


def _toml(name: str, value: str | int) -> str:
    return f"{name}={json.dumps(value)}"  # a JSON string or number is a TOML one


def opencode(served: Served) -> Setup:
    """opencode: its configuration as a variable, which goes before its files."""
    limit = {"context": served.n_context, "output": served.n_answer}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Keepwarm",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    name = f"keepwarm/{served.model}"
    told = {"provider": {"keepwarm": provider}, "model": name, "small_model": name}
    return Setup(
        ("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(told)}, {KEY_VARIABLE: served.key}
    )


def aider(served: Served) -> Setup:
    """aider, through the OpenAI API."""
    return Setup(
        ("aider", "--model", f"openai/{served.model}", "--no-show-model-warnings"),
        {"OPENAI_API_BASE": f"{served.url}/v1"},
        {"OPENAI_API_KEY": served.key},
    )


def anything(served: Served) -> Setup:
    """Any program that uses the official SDKs; its command line follows `--`."""
    return Setup(
        (),
        {"OPENAI_BASE_URL": f"{served.url}/v1", "ANTHROPIC_BASE_URL": served.url},
        {"OPENAI_API_KEY": served.key, "ANTHROPIC_AUTH_TOKEN": served.key},
        ("ANTHROPIC_API_KEY",),
    )


CLIENTS: Mapping[str, SetUp] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
    "any": anything,
}

"""The environment and arguments that point each client at this server.

Variables and options as of claude 2.1, codex 0.166, opencode 1.18, qwen 0.24, aider 0.86.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from keepwarm.errors import BadInput

AGENT_HEADER = "X-Keepwarm-Agent"
KEY_VARIABLE = "KEEPWARM_API_KEY"  # for clients whose key variable can be chosen
NO_KEY = "keepwarm"  # clients insist on a key; a server without keys accepts any


@dataclass(frozen=True)
class ServerInfo:
    """What a client must know about a running server."""

    url: str  # without /v1
    model: str
    n_context: int
    key: str = field(default=NO_KEY, repr=False)
    agent: str = ""  # for all that the client sends; empty: every conversation has its own id

    @property
    def n_answer(self) -> int:
        """Answer tokens that a client may ask for; the defaults are made for larger models."""
        return self.n_context // 4

    @property
    def headers(self) -> dict[str, str]:
        return {AGENT_HEADER: self.agent} if self.agent else {}


@dataclass(frozen=True)
class ClientSetup:
    """How to start a client. `secrets` are variables too, but are never printed."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict)  # by the variable that has the path
    cleared: tuple[str, ...] = ()  # variables that would point the client elsewhere
    first_prompt: int = 0  # tokens that it sends before the user's question, about

    def shell_lines(self, command: Sequence[str], key: str | None = None) -> list[str]:
        """Shell commands that start the client; `key` is an expression in place of the key."""
        unset = [f"unset {' '.join(self.cleared)}"] if self.cleared else []
        plain = [f"export {name}={shlex.quote(value)}" for name, value in self.environ.items()]
        secret = [
            f"export {name}={shlex.quote(value) if key is None else key}"
            for name, value in self.secrets.items()
        ]
        written = [line for name, text in self.files.items() for line in _written(name, text)]
        return [*unset, *plain, *written, *secret, *([shlex.join(command)] if command else [])]

    def warnings(self, server: ServerInfo) -> Iterator[str]:
        """Why conversations may end early with this server."""
        context = f"{server.model} has a context of {server.n_context:,} tokens"
        n_left = server.n_context - self.first_prompt
        if n_left < server.n_answer:
            fate = f"leaves {n_left:,} for the conversation" if n_left > 0 else "is too short"
            yield (
                f"Warning: the first prompt of {self.command[0]} has about {self.first_prompt:,} "
                f"tokens. {context}, which {fate}; stop the server and serve a model with a "
                "longer one (`keepwarm models --fit` lists some)."
            )


def _written(name: str, text: str) -> tuple[str, str]:
    """Shell commands that write a new file, which no other user can have made before."""
    return f'export {name}="$(mktemp)"', f'printf %s {shlex.quote(text)} > "${name}"'


SetupFunction: TypeAlias = Callable[[ServerInfo], ClientSetup]


def claude(server: ServerInfo) -> ClientSetup:
    """Claude Code. All its model tiers become the served model."""
    tiers = ("OPUS", "SONNET", "HAIKU", "FABLE")
    headers = "\n".join(f"{name}: {value}" for name, value in server.headers.items())
    return ClientSetup(
        ("claude",),
        {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_MODEL": server.model,
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": server.model for tier in tiers},
            "CLAUDE_CODE_SUBAGENT_MODEL": server.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.n_context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.n_answer),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **({"ANTHROPIC_CUSTOM_HEADERS": headers} if headers else {}),
        },
        {"ANTHROPIC_AUTH_TOKEN": server.key},
        cleared=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
        first_prompt=29_000,
    )


def codex(server: ServerInfo) -> ClientSetup:
    """Codex: a provider defined on the command line; no file is written."""
    provider = {
        "name": "Keepwarm",
        "base_url": f"{server.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
        **{f"http_headers.{name}": value for name, value in server.headers.items()},
    }
    options: dict[str, str | int] = {
        "model": server.model,
        "model_provider": "keepwarm",
        "model_context_window": server.n_context,
        **{f"model_providers.keepwarm.{name}": value for name, value in provider.items()},
    }
    arguments = [part for name, value in options.items() for part in ("-c", _toml(name, value))]
    return ClientSetup(("codex", *arguments), {}, {KEY_VARIABLE: server.key}, first_prompt=13_000)


def _toml(name: str, value: str | int) -> str:
    return f"{name}={json.dumps(value)}"  # a JSON string or number is a TOML one


def opencode(server: ServerInfo) -> ClientSetup:
    """opencode: its configuration in a variable, which overrides its files."""
    limit = {"context": server.n_context, "output": server.n_answer}
    options = {"baseURL": f"{server.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"}
    headers = {"headers": server.headers} if server.headers else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Keepwarm",
        "options": {**options, **headers},
        "models": {server.model: {"name": server.model, "limit": limit}},
    }
    name = f"keepwarm/{server.model}"
    config = {"provider": {"keepwarm": provider}, "model": name, "small_model": name}
    return ClientSetup(
        ("opencode",),
        {"OPENCODE_CONFIG_CONTENT": json.dumps(config)},
        {KEY_VARIABLE: server.key},
        first_prompt=11_000,
    )


def qwen(server: ServerInfo) -> ClientSetup:
    """Qwen Code, through the OpenAI API.

    Only a settings file can name the context; this is the one that the user's own override. Qwen
    Code compacts when 33,000 tokens are left, so in a context that is full by then with the first
    prompt it is not told, and compacts when it is refused: else it would after every question.
    """
    _check_nameless(server, "Qwen Code")
    first_prompt, n_left = 24_000, 33_000
    settings = {"model": {"generationConfig": {"contextWindowSize": server.n_context}}}
    is_told = server.n_context >= first_prompt + n_left
    return ClientSetup(
        ("qwen", "--auth-type", "openai"),
        {
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_MODEL": server.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(server.n_answer),
        },
        {"OPENAI_API_KEY": server.key},
        {"QWEN_CODE_SYSTEM_DEFAULTS_PATH": json.dumps(settings)} if is_told else {},
        first_prompt=first_prompt,
    )


def aider(server: ServerInfo) -> ClientSetup:
    """aider, through the OpenAI API.

    It cannot be told the context, only how much history it may keep: a sixteenth of it, between
    these bounds, is what it takes for models that it knows.
    """
    _check_nameless(server, "aider")
    n_history = min(max(server.n_context // 16, 1_024), 8_192)
    named = ("--model", f"openai/{server.model}", "--no-show-model-warnings")
    return ClientSetup(
        ("aider", *named, "--max-chat-history-tokens", str(n_history)),
        {"OPENAI_API_BASE": f"{server.url}/v1"},
        {"OPENAI_API_KEY": server.key},
    )


def any_sdk(server: ServerInfo) -> ClientSetup:
    """Any program that uses an official SDK; its command line follows `--`."""
    _check_nameless(server, "an SDK")
    return ClientSetup(
        (),
        {
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "ANTHROPIC_BASE_URL": server.url,
            "OLLAMA_HOST": server.url,
        },
        dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OLLAMA_API_KEY"), server.key),
        cleared=("ANTHROPIC_API_KEY",),
    )


def _check_nameless(server: ServerInfo, client: str) -> None:
    if server.agent:
        raise BadInput(
            f"No variable names the agent of {client}; leave out --agent, and send the header "
            f"{AGENT_HEADER} from the program."
        )


CLIENTS: Mapping[str, SetupFunction] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "qwen": qwen,
    "aider": aider,
    "any": any_sdk,
}

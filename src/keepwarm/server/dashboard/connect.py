"""What to paste into a shell, or a program, so that a client uses this server."""

from __future__ import annotations

import json
from collections.abc import Iterator

from keepwarm.server.clients import CLIENTS, KEY_VARIABLE, ServerInfo
from keepwarm.server.dashboard.shapes import ClientOut

TITLES = {
    "claude": "Claude Code",
    "codex": "Codex",
    "opencode": "opencode",
    "qwen": "Qwen Code",
    "aider": "aider",
    "any": "Any OpenAI, Anthropic or Ollama SDK",
}
ABOUT_ANY = "Then start the program in the same shell."


def clients_out(server: ServerInfo, key_name: str | None) -> list[ClientOut]:
    """`key_name` is None where the server needs no key."""
    key = None if key_name is None else f'"${KEY_VARIABLE}"'
    first = [] if key_name is None else [f"export {KEY_VARIABLE}=…  # the key {key_name}"]
    return [*_launched(server, key, first), _curl(server, key, first)]


def _launched(server: ServerInfo, key: str | None, first: list[str]) -> Iterator[ClientOut]:
    for name, set_up in CLIENTS.items():
        setup = set_up(server)
        notes = [warning.removeprefix("Warning: ") for warning in setup.warnings(server)]
        yield {
            "client": name,
            "title": TITLES.get(name, name),
            "lines": [*first, *setup.shell_lines(setup.command, key)],
            "notes": [*notes, *([] if setup.command else [ABOUT_ANY])],
        }


def _curl(server: ServerInfo, key: str | None, first: list[str]) -> ClientOut:
    said = [{"role": "user", "content": "Say hello."}]
    body = json.dumps({"model": server.model, "messages": said, "max_tokens": 32})
    header = [] if key is None else [f'  -H "Authorization: Bearer ${KEY_VARIABLE}" \\']
    return {
        "client": "curl",
        "title": "curl",
        "lines": [
            *first,
            f"curl {server.url}/v1/chat/completions \\",
            "  -H 'Content-Type: application/json' \\",
            *header,
            f"  -d '{body}'",
        ],
        "notes": [],
    }

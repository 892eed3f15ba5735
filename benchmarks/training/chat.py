"""Conversations as the default model sees them: its template, and tools as Keepwarm writes them.

Written out here, because training runs where Keepwarm is not installed; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string"} for parameter in parameters},
                "required": list(parameters),
            },
        },
    }
    for name, description, parameters in (
        ("edit_file", "Replace a text in a file.", ("path", "old", "new")),
        ("read_file", "Read a file.", ("path",)),
        ("write_file", "Write a file.", ("path", "content")),
    )
]
TOOL_BLOCK = """\
# Tools

You may call one or more of these functions to help with the request:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "<function>", "arguments": {{"<parameter>": <value>}}}}
</tool_call>
What it returns comes back between <tool_response> and </tool_response>."""


class Message(NamedTuple):
    role: str
    content: str


def rendered(messages: Iterable[Message]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


def tool_block() -> str:
    return TOOL_BLOCK.format(tools="\n".join(json.dumps(tool, sort_keys=True) for tool in TOOLS))


def call(name: str, **arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'


def response(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Tools and calls as the engine takes them, whatever an API calls them."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator

from keepwarm.errors import BadField
from keepwarm.text.request import Tool
from keepwarm.text.tools import STRICT, UNKNOWN_TOOL

Mode = Literal["auto", "none", "required"]
# Mistral's clients write `any` for `required`.
ChosenMode: TypeAlias = Annotated[
    Mode, BeforeValidator(lambda given: "required" if given == "any" else given)
]
# A custom tool, whose input is text, is a function with this one argument.
TEXT_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def function_tool(
    name: str, description: str | None, parameters: object, strict: bool | None = None
) -> Tool:
    fields = {"name": name, "description": description, "parameters": parameters, STRICT: strict}
    function = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def names_of(tools: Sequence[Tool]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def allowed_tools(tools: Sequence[Tool], names: Collection[str]) -> list[Tool]:
    """Those with these names, all of which must be there."""
    if not names_of(tools).issuperset(names):
        raise BadField(UNKNOWN_TOOL, "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in names]


# Calls of custom tools


def custom_arguments(text: str) -> str:
    """The arguments by which a custom tool is called as a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text in such arguments, without halves of characters."""
    try:
        text = json.loads(arguments)["input"]
    except (ValueError, LookupError, TypeError):
        return arguments
    return text.encode(errors="replace").decode() if isinstance(text, str) else arguments

"""Anthropic's tools: those offered from the start, and those that messages add later.

A deferred tool is not at the beginning of the prompt. It is written where a message refers to it,
so that everything before that message stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from keepwarm.errors import BadField
from keepwarm.server.anthropic.shapes import AnthropicTool, ContentBlock, CountRequest, MessageIn
from keepwarm.text.request import Tool, ToolChoice
from keepwarm.text.tools import DEFERRED

MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
SEARCH = "tool_search_tool"  # type prefix of tool searches that run on Anthropic's servers
ADDED = "From here on this tool can be called:\n{}"
REMOVED = "The tool {} can no longer be called."


def offered_tools(body: CountRequest) -> list[Tool]:
    """The client's tools. None is deferred if the search for them runs on Anthropic's servers."""
    tools = body.tools or ()
    searched = any((tool.type or "").startswith(SEARCH) for tool in tools)
    given = [_tool(t, bool(t.defer_loading) and not searched) for t in tools if _is_client_tool(t)]
    names = {tool["function"]["name"] for tool in given}
    added = {tool.name: _tool(tool, deferred=True) for tool in _added_tools(body)}
    return given + [tool for name, tool in added.items() if name not in names]


def ignored_tools(body: CountRequest) -> list[str]:
    return [tool.name for tool in body.tools or () if not _is_client_tool(tool)]


def tool_choice_of(body: CountRequest) -> ToolChoice:
    wanted = body.tool_choice
    if wanted is None:
        return ToolChoice()
    names = {tool["function"]["name"] for tool in offered_tools(body)}
    if wanted.type == "any" and not names:
        raise BadField(
            "tool_choice is any, but tools is empty; send tools or omit tool_choice.", "tool_choice"
        )
    if wanted.type == "tool" and wanted.name not in names:
        raise BadField(
            "tool_choice names a tool that is not in tools; add it or choose another.",
            "tool_choice.name",
        )
    return ToolChoice(
        mode=MODES[wanted.type],  # type: ignore[arg-type]
        name=wanted.name if wanted.type == "tool" else None,
        parallel=not wanted.disable_parallel_tool_use,
    )


def expand_tool_references(body: CountRequest) -> list[MessageIn]:
    """The messages, with tool references replaced by text."""
    known = {tool["function"]["name"]: _tool_text(tool) for tool in offered_tools(body)}
    return [
        message.model_copy(update={"content": _blocks(message.content, known)})
        for message in body.messages
    ]


def _blocks(
    content: str | Sequence[ContentBlock], known: Mapping[str, str]
) -> str | list[ContentBlock]:
    if isinstance(content, str):
        return content
    return [_block(block, known) for block in content]


def _block(block: ContentBlock, known: Mapping[str, str]) -> ContentBlock:
    if block.type == "tool_result" and block.content:
        return block.model_copy(update={"content": _blocks(block.content, known)})
    name = block.tool_name or _changed_tool(block)
    if name is None:
        return block
    shown = known.get(name, name)
    texts = {
        "tool_reference": shown,
        "tool_addition": ADDED.format(shown),
        "tool_removal": REMOVED.format(name),
    }
    if block.type not in texts:
        return block
    return ContentBlock(type="text", text=texts[block.type], cache_control=block.cache_control)


def _changed_tool(block: ContentBlock) -> str | None:
    """The name of the tool that a block adds or removes."""
    if block.tool is None:
        return None
    return block.tool.definition.name if block.tool.definition else block.tool.name


def _added_tools(body: CountRequest) -> Iterator[AnthropicTool]:
    """Tools that messages define."""
    for message in body.messages:
        for block in message.content:
            if isinstance(block, ContentBlock) and block.tool and block.tool.definition:
                yield block.tool.definition


def _is_client_tool(tool: AnthropicTool) -> bool:
    """Whether the client runs the tool and defines its schema."""
    return tool.type in (None, "custom")


def _tool(tool: AnthropicTool, deferred: bool) -> Tool:
    if tool.input_schema is None:
        where = "tools.input_schema"
        raise BadField(f"The tool {tool.name!r} has no input_schema; add one.", where)
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    offer = {"type": "function", "function": function}
    return {**offer, DEFERRED: True} if deferred else offer


def _tool_text(tool: Tool) -> str:
    """A tool as it appears in a message."""
    text = json.dumps(tool["function"], ensure_ascii=False, sort_keys=True)
    return f"<function>{text}</function>"

"""Anthropic's tools: which are offered, and those that a message brings along later.

A tool that is deferred is no part of the prompt's beginning. It is written where a message refers
to it, so that all before that place stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from keepwarm.errors import BadField
from keepwarm.server.anthropic.shapes import AnthropicTool, ContentBlock, CountRequest, MessageIn
from keepwarm.text.request import Tool, ToolChoice
from keepwarm.text.tools import DEFERRED

MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
SEARCH = "tool_search_tool"  # how the types of searches begin that run on Anthropic's servers
ADDED = "From here on this tool can be called:\n{}"
REMOVED = "The tool {} can no longer be called."


def offered(body: CountRequest) -> list[Tool]:
    """The client's own tools. Where nobody here could search for one, none is deferred."""
    tools = body.tools or ()
    searched = any((tool.type or "").startswith(SEARCH) for tool in tools)
    given = [_tool(t, bool(t.defer_loading) and not searched) for t in tools if _is_ours(t)]
    names = {tool["function"]["name"] for tool in given}
    added = {tool.name: _tool(tool, deferred=True) for tool in _added(body)}
    return given + [tool for name, tool in added.items() if name not in names]


def ignored_tools(body: CountRequest) -> list[str]:
    return [tool.name for tool in body.tools or () if not _is_ours(tool)]


def choice_of(body: CountRequest) -> ToolChoice:
    wanted = body.tool_choice
    if wanted is None:
        return ToolChoice()
    names = {tool["function"]["name"] for tool in offered(body)}
    if wanted.type == "any" and not names:
        raise BadField("tool_choice is any and there are no tools; send some.", "tool_choice")
    if wanted.type == "tool" and wanted.name not in names:
        raise BadField("tool_choice names a tool that is not in tools.", "tool_choice.name")
    return ToolChoice(
        mode=MODES[wanted.type],  # type: ignore[arg-type]
        name=wanted.name if wanted.type == "tool" else None,
        parallel=not wanted.disable_parallel_tool_use,
    )


def spelled_out(body: CountRequest) -> list[MessageIn]:
    """The messages, with text in place of each tool that one of them refers to."""
    known = {tool["function"]["name"]: _written(tool) for tool in offered(body)}
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
    name = block.tool_name or _changed(block)
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


def _changed(block: ContentBlock) -> str | None:
    """The name of the tool that a block adds or takes away."""
    if block.tool is None:
        return None
    return block.tool.definition.name if block.tool.definition else block.tool.name


def _added(body: CountRequest) -> Iterator[AnthropicTool]:
    """Tools that messages bring along whole."""
    for message in body.messages:
        for block in message.content:
            if isinstance(block, ContentBlock) and block.tool and block.tool.definition:
                yield block.tool.definition


def _is_ours(tool: AnthropicTool) -> bool:
    """Whether the client itself runs the tool and says what goes into it."""
    return tool.type in (None, "custom")


def _tool(tool: AnthropicTool, deferred: bool) -> Tool:
    if tool.input_schema is None:
        where = "tools.input_schema"
        raise BadField(f"The tool {tool.name!r} has no input_schema; send one.", where)
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    offer = {"type": "function", "function": function}
    return {**offer, DEFERRED: True} if deferred else offer


def _written(tool: Tool) -> str:
    """A tool as a message shows it."""
    text = json.dumps(tool["function"], ensure_ascii=False, sort_keys=True)
    return f"<function>{text}</function>"

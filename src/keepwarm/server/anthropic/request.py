"""Anthropic's messages: what requests may hold, and their conversion for the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from keepwarm.config import Settings
from keepwarm.errors import BadField, NoThreads
from keepwarm.server.http.body import (
    Checked,
    JsonInput,
    Members,
    TokenCount,
    TopK,
    token_limit,
)
from keepwarm.server.http.content import SkippedContent, decode_text, text_part, titled
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    FormatFields,
    SamplingFields,
    ThinkingFields,
    UnsupportedFields,
    format_of,
    thinking_of,
)
from keepwarm.server.http.tools import Mode, function_tool, names_of
from keepwarm.text.request import (
    Breakpoint,
    Format,
    Message,
    Request,
    Sampling,
    Tool,
    ToolChoice,
)
from keepwarm.text.sampling_rules import MAX_STOPS
from keepwarm.text.tools import DEFERRED, described, function_call

LARGEST = (1 << 31) - 1
CLIENT_TYPES = (None, "custom")  # of tools that the client runs and defines

Ttl = Literal["5m", "1h"]


def _listed(content: object) -> object:
    """Results of tools that ran at Anthropic are one object, not a list of blocks."""
    return [content] if isinstance(content, dict) else content


class CacheControl(JsonInput):
    """A breakpoint: the prompt up to here is kept for the given time."""

    type: Literal["ephemeral"]
    ttl: Ttl = "5m"


class AnthropicTool(JsonInput):
    """A client tool. Tools that run on Anthropic's servers are ignored; the receipt lists them."""

    type: str | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Arguments follow the schema.")
    defer_loading: bool | None = Field(
        default=None, description="Not shown until a message refers to it."
    )
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Some tools of Anthropic's have no name, as `mcp_toolset`: their type is one."""
        if isinstance(given, dict) and given.get("type") not in CLIENT_TYPES:
            return {"name": given["type"], **given}
        return given


class ToolChange(JsonInput):
    """A tool that a message adds or removes, by name or with its definition."""

    type: str
    name: str | None = None
    definition: AnthropicTool | None = None


class DocumentSource(JsonInput):
    """Where a document or image is: text, blocks, or base64 of a media type."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    content: str | Members[ContentBlock] | None = None


class ContentBlock(JsonInput):
    """Part of a message: text, documents of text, thinking, tool_use, tool_result, tools.

    Others become a note; in the user's newest message they are rejected.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: Any = Field(default=None, description="Not checked.")
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    tool: ToolChange | None = None
    content: Annotated[str | Members[ContentBlock] | None, BeforeValidator(_listed)] = None
    title: str | None = None
    source: str | DocumentSource | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class MessageIn(JsonInput):
    role: Literal["user", "assistant", "system"]
    content: str | Members[Annotated[ContentBlock, BeforeValidator(text_part)]]


class ToolChoiceIn(JsonInput):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(JsonInput):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(JsonInput):
    effort: str | None = Field(default=None, description="Passed to the chat template.")
    format: JsonFormat | None = None


class Metadata(JsonInput):
    user_id: str | None = Field(default=None, description="Names the conversation.")


class CountRequest(PromptBody, FormatFields, ThinkingFields, UnsupportedFields):
    """The fields that determine the prompt."""

    messages: Members[MessageIn] = Field(min_length=1)
    system: str | Members[ContentBlock] | None = None
    tools: Members[AnthropicTool] | None = None
    tool_choice: ToolChoiceIn | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(
        default=None, description="Another name of `output_config.format`."
    )
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None


class MessagesRequest(CountRequest, SamplingFields):
    max_tokens: Annotated[TokenCount, Field(le=LARGEST)] = Field(
        validation_alias=AliasChoices(*MAX_TOKENS, "max_completion_tokens")
    )
    stream: bool | None = None
    stop_sequences: Checked[str] | None = Field(
        default=None,
        max_length=MAX_STOPS,
        validation_alias=AliasChoices("stop_sequences", "stop"),
    )
    top_k: Annotated[TopK, Field(le=LARGEST)] | None = None
    thread: Any = Field(default=None, description="Rejected: send all messages.")


MODES: Mapping[str, Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
SEARCH = "tool_search_tool"  # type prefix of tool searches that run on Anthropic's servers
ADDED = "From here on this tool can be called:\n{}"
REMOVED = "The tool {} can no longer be called."
REFUSED = "The tool {} cannot be called."
TTL_S = {"5m": 300.0, "1h": 3600.0}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
ERROR_PREFIX = "Error: "  # before the result of a tool that failed
NO_THREADS = (
    "thread is not supported, because it names a conversation at Anthropic; omit it and send "
    "all messages: only the new ones are computed."
)
_SESSION = re.compile(r"_session_([0-9a-fA-F-]{36})$")


class EngineMessage(NamedTuple):
    """A message for the engine, and the breakpoint at its end."""

    message: Message
    cache_control: CacheControl | None = None


def request_of(body: CountRequest, fields: Request, settings: Settings) -> Request:
    if isinstance(body, MessagesRequest) and body.thread:
        raise NoThreads(NO_THREADS, "thread")
    tools = offered_tools(body)
    expanded = expand_tool_references(body, tools)
    unread = SkippedContent.of(settings, "messages", [_role(message) for message in expanded])
    converted = [*_system(body, unread)]
    converted += [each for i, m in enumerate(expanded) for each in _convert(m, i, unread)]
    messages, is_partial = _split_partial([each.message for each in converted])
    output = body.output_config
    thinking = thinking_of(body)
    if output and output.effort:  # which switches nothing
        thinking = thinking._replace(effort=EFFORTS.get(output.effort, output.effort))
    return replace(
        fields,
        messages=messages,
        partial_answer=is_partial,
        unread=unread.kinds,
        tools=tools,
        tool_choice=tool_choice_of(body),
        thinking=thinking.switch,
        template_options=thinking.options,
        format=format_of(
            body,
            output_config=_format(output.format if output else None),
            output_format=_format(body.output_format),
        ),
        sampling=_sampling(body) if isinstance(body, MessagesRequest) else Sampling(),
        breakpoints=_breakpoints(body, converted[: len(messages)]),
    )


def session_of(user_id: str | None) -> str | None:
    """The conversation that `metadata.user_id` names; Claude Code puts its session id in it."""
    if not user_id:
        return None
    try:
        fields = json.loads(user_id)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict):
        session = fields.get("session_id")
        return session if isinstance(session, str) and session else user_id
    named = _SESSION.search(user_id)
    return named[1] if named else user_id


def _format(wanted: JsonFormat | None) -> Format | None:
    return Format(json=True, schema=wanted.schema_) if wanted else None


def _sampling(body: MessagesRequest) -> Sampling:
    return Sampling(
        max_tokens=token_limit(body.max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=bool(body.ignore_eos),
        stop=tuple(filter(None, body.stop_sequences or ())),
    )


# Messages


def _split_partial(messages: Sequence[Message]) -> tuple[list[Message], bool]:
    """The messages, and whether the last is the beginning of the answer; an empty one is not."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return list(messages), False
    is_empty = not last["content"].strip() and not last.get("tool_calls")
    return list(messages[:-1] if is_empty else messages), not is_empty


def _role(message: MessageIn) -> str:
    """Whose a message is; with tool results it is the client's."""
    blocks = () if isinstance(message.content, str) else message.content
    return "tool" if any(block.type == "tool_result" for block in blocks) else message.role


def _system(body: CountRequest, unread: SkippedContent) -> Iterator[EngineMessage]:
    if body.system:
        yield _text_message("system", body.system, "system", unread)


def _convert(message: MessageIn, index: int, unread: SkippedContent) -> Iterator[EngineMessage]:
    where = f"messages[{index}].content"
    if message.role == "assistant":
        yield _assistant(message.content, where, unread)
    elif message.role == "user" and not isinstance(message.content, str):
        yield from _user(message.content, where, unread)
    else:
        yield _text_message(message.role, message.content, where, unread)


def _text_message(
    role: str,
    content: str | Sequence[ContentBlock],
    where: str,
    unread: SkippedContent,
    first: int = 0,
) -> EngineMessage:
    """A message of text only. Blocks are not joined: scrubbing rules apply to each block."""
    if isinstance(content, str):
        return EngineMessage({"role": role, "content": content})
    texts = [_text(block, f"{where}[{i}]", unread) for i, block in enumerate(content, first)]
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if role == "system":  # what stands behind the last mark is not stable
        marks = [{"cache_control": True} if block.cache_control else {} for block in content]
        parts = [part | mark for part, mark in zip(parts, marks, strict=True)]
    return EngineMessage({"role": role, "content": parts}, _longest_ttl(content))


def _user(
    blocks: Sequence[ContentBlock], where: str, unread: SkippedContent
) -> Iterator[EngineMessage]:
    """Tool results become messages of their own; the order is kept."""
    texts: list[ContentBlock] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if texts:
            yield _text_message("user", texts, where, unread, index - len(texts))
            texts = []
        yield _tool_result(block, f"{where}[{index}]", unread)
    if texts or not blocks:
        yield _text_message("user", texts, where, unread, len(blocks) - len(texts))


def _tool_result(block: ContentBlock, where: str, unread: SkippedContent) -> EngineMessage:
    if block.tool_use_id is None:
        raise BadField(f"{where}.tool_use_id is required but missing.", f"{where}.tool_use_id")
    content = _joined(block.content, f"{where}.content", unread)
    content = ERROR_PREFIX + content if block.is_error else content
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    return EngineMessage(message, block.cache_control)


def _assistant(
    content: str | Sequence[ContentBlock], where: str, unread: SkippedContent
) -> EngineMessage:
    """Past thinking becomes `reasoning_content`; the template uses it or drops it."""
    if isinstance(content, str):
        return EngineMessage({"role": "assistant", "content": content})
    blocks = [block for block in content if block.type != "redacted_thinking"]
    if len(blocks) < len(content):
        unread.leave_out("reasoning")  # encrypted, by another server
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_tool_call(block, f"{where}[{index}]"))
        else:
            texts.append(_text(block, f"{where}[{index}]", unread))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return EngineMessage(message, _longest_ttl(content))


def _tool_call(block: ContentBlock, where: str) -> Mapping[str, Any]:
    if block.id is None or block.name is None:
        raise BadField(f"{where} needs both id and name.", where)
    return function_call(block.id, block.name, json.dumps(block.input or {}, ensure_ascii=False))


def _joined(
    content: str | Sequence[ContentBlock] | None, where: str, unread: SkippedContent
) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(block, f"{where}[{i}]", unread) for i, block in enumerate(content))


def _text(block: ContentBlock, where: str, unread: SkippedContent) -> str:
    if block.type == "text":
        if block.text is None:
            raise BadField(f"{where}.text is required but missing.", f"{where}.text")
        return block.text
    text = None
    if block.type == "compaction" and isinstance(block.content, str):
        text = block.content
    elif block.type == "document" and isinstance(block.source, DocumentSource):
        text = _document_text(block.source, f"{where}.source", unread)
    elif block.type == "search_result":
        text = _joined(block.content, f"{where}.content", unread)
        text = titled(block.source if isinstance(block.source, str) else None, text)
    return unread.note(block.type, where) if text is None else titled(block.title, text)


def _document_text(source: DocumentSource, where: str, unread: SkippedContent) -> str | None:
    """The text of a document; None if it is something else, as a PDF."""
    if source.type == "content":
        return _joined(source.content, f"{where}.content", unread)
    if source.type == "base64":
        return decode_text(source.data or "", source.media_type)
    return source.data if source.type == "text" else None


# Breakpoints


def _breakpoints(body: CountRequest, messages: Sequence[EngineMessage]) -> tuple[Breakpoint, ...]:
    """Each at the end of its message; one on the body is at the end of the prompt."""
    tools = [tool.cache_control for tool in body.tools or () if tool.cache_control]
    found = [(-1, control) for control in tools]
    found += [(i, m.cache_control) for i, m in enumerate(messages) if m.cache_control]
    if body.cache_control:
        found.append((len(messages) - 1, body.cache_control))
    longest: dict[int, float] = {}
    for message, control in found:
        longest[message] = max(longest.get(message, 0.0), TTL_S[control.ttl])
    return tuple(Breakpoint(message, ttl_s) for message, ttl_s in longest.items())


def _longest_ttl(blocks: Sequence[ContentBlock]) -> CacheControl | None:
    controls = [block.cache_control for block in blocks if block.cache_control]
    return max(controls, key=lambda control: TTL_S[control.ttl], default=None)


# Tools. A deferred tool is not at the beginning of the prompt: it is written where a message
# refers to it, so that everything before that message stays the same.


def offered_tools(body: CountRequest) -> list[Tool]:
    """The client's tools. None is deferred if the search for them runs on Anthropic's servers."""
    tools = body.tools or ()
    searched = any((tool.type or "").startswith(SEARCH) for tool in tools)
    offered = [
        _tool(t, bool(t.defer_loading) and not searched) for t in tools if _is_client_tool(t)
    ]
    names = names_of(offered)
    defined = filter(_is_client_tool, _added_tools(body))
    added = {tool.name: _tool(tool, deferred=True) for tool in defined}
    return offered + [tool for name, tool in added.items() if name not in names]


def ignored_tools(body: CountRequest) -> list[str]:
    tools = (*(body.tools or ()), *_added_tools(body))
    return list(dict.fromkeys(tool.name for tool in tools if not _is_client_tool(tool)))


def tool_choice_of(body: CountRequest) -> ToolChoice:
    wanted = body.tool_choice
    if wanted is None:
        return ToolChoice()
    name = wanted.name or "" if wanted.type == "tool" else None
    return ToolChoice(MODES[wanted.type], name, not wanted.disable_parallel_tool_use)


def expand_tool_references(body: CountRequest, tools: Sequence[Tool]) -> list[MessageIn]:
    """The messages, with tool references replaced by text."""
    known = {tool["function"]["name"]: _tool_text(tool) for tool in tools}
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
        "tool_addition": (ADDED if name in known else REFUSED).format(shown),
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
    return tool.type in CLIENT_TYPES


def _tool(tool: AnthropicTool, deferred: bool) -> Tool:
    if tool.input_schema is None:
        where = "tools.input_schema"
        raise BadField(f"The tool {tool.name!r} has no input_schema; add one.", where)
    offer = function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
    return {**offer, DEFERRED: True} if deferred else offer


def _tool_text(tool: Tool) -> str:
    """A tool as it appears in a message."""
    text = json.dumps(described(tool["function"]), ensure_ascii=False, sort_keys=True)
    return f"<function>{text}</function>"

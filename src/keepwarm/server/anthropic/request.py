"""Anthropic's messages: the request as the engine takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keepwarm.config import Settings
from keepwarm.errors import BadField, NoThreads
from keepwarm.server.anthropic.shapes import (
    CacheControl,
    ContentBlock,
    CountRequest,
    MessageIn,
    MessagesRequest,
)
from keepwarm.server.anthropic.tools import choice_of, offered, spelled_out
from keepwarm.server.http.content import unsupported_part
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.text.request import (
    Breakpoint,
    Format,
    Message,
    Request,
    Sampling,
)

TTL_S = {"5m": 300.0, "1h": 3600.0}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
THINKING = {"enabled": True, "disabled": False}  # whatever else: as the template does by itself
IS_ERROR = "Error: "  # stands before what a tool that failed gave back
PREFILL = (
    "The last message is the assistant's, and answers are not begun by the client here; "
    "end with a user message."
)
NO_THREADS = (
    "thread asks the server to remember the conversation, which it does not; leave it out and send "
    "all messages, of which only the new ones are computed."
)
_SESSION = re.compile(r"_session_([0-9a-fA-F-]{36})$")


class EngineMessage(NamedTuple):
    """A message as the engine takes it, and the breakpoint at its end."""

    message: Message
    mark: CacheControl | None = None


def request_of(body: CountRequest, caller: RequestFields, settings: Settings) -> Request:
    """What the client asks, in the engine's words."""
    _check(body)
    given = spelled_out(body)
    placed = [*_system(body), *(each for i, m in enumerate(given) for each in _placed(m, i))]
    messages = [each.message for each in placed]
    output = body.output_config
    effort = output.effort if output else None
    return Request(
        messages=messages,
        tools=offered(body),
        tool_choice=choice_of(body),
        thinking=THINKING.get(body.thinking.type) if body.thinking else None,
        template_options={"reasoning_effort": EFFORTS.get(effort, effort)} if effort else {},
        format=Format(json=True, schema=output.format.schema_)
        if output and output.format
        else None,
        sampling=_sampling(body, settings) if isinstance(body, MessagesRequest) else Sampling(),
        breakpoints=_breakpoints(body, placed),
        **caller._asdict(),
    )


def session_of(user_id: str | None) -> str | None:
    """The conversation that `metadata.user_id` names: Claude Code puts its session inside."""
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


def _sampling(body: MessagesRequest, settings: Settings) -> Sampling:
    return Sampling(
        max_tokens=body.max_tokens,
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_p=body.top_p or 1.0,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
    )


# Messages.


def _check(body: CountRequest) -> None:
    """The whole conversation must be there; an answer that the client began is only counted."""
    if isinstance(body, MessagesRequest) and body.thread:
        raise NoThreads(NO_THREADS, "thread")
    spoken = [message.role for message in body.messages if message.role != "system"]
    if isinstance(body, MessagesRequest) and spoken[-1:] == ["assistant"]:
        raise BadField(PREFILL, "messages")


def _system(body: CountRequest) -> Iterator[EngineMessage]:
    if body.system:
        yield _said("system", body.system, "system")


def _placed(message: MessageIn, index: int) -> Iterator[EngineMessage]:
    where = f"messages[{index}].content"
    if message.role == "assistant":
        yield _assistant(message.content, where)
    elif message.role == "user" and not isinstance(message.content, str):
        yield from _user(message.content, where)
    else:
        yield _said(message.role, message.content, where)


def _said(
    role: str, content: str | Sequence[ContentBlock], where: str, first: int = 0
) -> EngineMessage:
    """A message of text alone. Its blocks stay apart: whoever scrubs must know them."""
    if isinstance(content, str):
        return EngineMessage({"role": role, "content": content})
    texts = [_text(block, f"{where}[{i}]") for i, block in enumerate(content, first)]
    parts = [{"type": "text", "text": text} for text in texts]
    return EngineMessage({"role": role, "content": parts}, _last_mark(content))


def _user(blocks: Sequence[ContentBlock], where: str) -> Iterator[EngineMessage]:
    """What tools gave back are messages of their own, in the order in which all of it stands."""
    said: list[ContentBlock] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            said.append(block)
            continue
        if said:
            yield _said("user", said, where, index - len(said))
            said = []
        yield _tool_result(block, f"{where}[{index}]")
    if said or not blocks:
        yield _said("user", said, where, len(blocks) - len(said))


def _tool_result(block: ContentBlock, where: str) -> EngineMessage:
    if block.tool_use_id is None:
        raise BadField(f"{where}.tool_use_id is needed and not there.", f"{where}.tool_use_id")
    content = block.content or ""
    if not isinstance(content, str):
        texts = [_text(b, f"{where}.content[{i}]") for i, b in enumerate(content)]
        content = "\n".join(texts)
    content = IS_ERROR + content if block.is_error else content
    message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    return EngineMessage(message, block.cache_control)


def _assistant(content: str | Sequence[ContentBlock], where: str) -> EngineMessage:
    """Past thinking goes along under its own name; a template takes it or leaves it."""
    if isinstance(content, str):
        return EngineMessage({"role": "assistant", "content": content})
    blocks = [block for block in content if block.type != "redacted_thinking"]
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_tool_call(block, f"{where}[{index}]"))
        else:
            texts.append(_text(block, f"{where}[{index}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return EngineMessage(message, _last_mark(content))


def _tool_call(block: ContentBlock, where: str) -> Mapping[str, Any]:
    if block.id is None or block.name is None:
        raise BadField(f"{where} needs an id and a name.", where)
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        raise unsupported_part(block.type, where)
    if block.text is None:
        raise BadField(f"{where}.text is needed and not there.", f"{where}.text")
    return block.text


# What is to be kept.


def _breakpoints(body: CountRequest, placed: Sequence[EngineMessage]) -> tuple[Breakpoint, ...]:
    """Every breakpoint, at the end of its message; one of the whole body stands at the end."""
    tools = [tool.cache_control for tool in body.tools or () if tool.cache_control]
    found = [(-1, control) for control in tools]
    found += [(i, each.mark) for i, each in enumerate(placed) if each.mark]
    if body.cache_control:
        found.append((len(placed) - 1, body.cache_control))
    longest: dict[int, float] = {}
    for message, control in found:
        longest[message] = max(longest.get(message, 0.0), TTL_S[control.ttl])
    return tuple(Breakpoint(message, ttl_s) for message, ttl_s in longest.items())


def _last_mark(blocks: Sequence[ContentBlock]) -> CacheControl | None:
    marks = [block.cache_control for block in blocks if block.cache_control]
    return max(marks, key=lambda control: TTL_S[control.ttl], default=None)

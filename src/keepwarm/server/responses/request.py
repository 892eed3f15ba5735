"""OpenAI's responses: the request as the engine takes it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.http.content import content_of, text_of
from keepwarm.server.http.request_fields import RequestFields
from keepwarm.server.openai.chat import NOT_THINKING
from keepwarm.server.responses.shapes import (
    InputRequest,
    Item,
    NamedChoice,
    ResponsesRequest,
    ResponseTool,
    TextFormat,
)
from keepwarm.text.request import Format, Message, Request, Sampling, Tool, ToolChoice

SEALED = "keepwarm1:"  # before reasoning that a client keeps for us
LOGPROBS = "message.output_text.logprobs"  # among what is to be included
NAMESPACE = "__"  # between the name of a namespace and that of its function

# The order of what an assistant does in one turn; whatever comes earlier in it begins another.
RANKS = {"reasoning": 0, "message": 1, "function_call": 2}


class QualifiedName(NamedTuple):
    """What a client calls a function."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """What the model calls it."""
        return f"{self.namespace}{NAMESPACE}{self.name}" if self.namespace else self.name


class OfferedTools(NamedTuple):
    tools: list[Tool]
    names: Mapping[str, QualifiedName]  # by what the model calls them
    ignored: list[str]


def request_of(
    body: InputRequest, items: Sequence[Item], caller: RequestFields, settings: Settings
) -> Request:
    """What the client asks, in the engine's words; `items` are those of earlier answers too."""
    told = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*told, *messages_of(items)]
    if not messages:
        raise BadField("There is no input; send some.", "input")
    tools = offered(body.tools or ())
    effort = body.reasoning.effort if body.reasoning else None
    return Request(
        messages=messages,
        tools=tools.tools,
        tool_choice=_tool_choice(body, tools),
        thinking=None if effort is None else effort not in NOT_THINKING,
        template_options={} if effort is None else {"reasoning_effort": effort},
        format=_format(body.text.format) if body.text and body.text.format else None,
        sampling=_sampling(body, settings) if isinstance(body, ResponsesRequest) else Sampling(),
        **caller._asdict(),
    )


def items_of(given: str | Sequence[Item] | None) -> list[Item]:
    if isinstance(given, str):
        return [Item(type="message", role="user", content=given)]
    return list(given or ())


def offered(tools: Sequence[ResponseTool]) -> OfferedTools:
    """The functions among these tools; whatever runs on OpenAI's servers is left out."""
    found = OfferedTools([], {}, [])
    names: dict[str, QualifiedName] = {}
    for tool in tools:
        inner = tool.tools or () if tool.type == "namespace" else (tool,)
        namespace = tool.name if tool.type == "namespace" else None
        for function in inner:
            if function.type == "function" and function.name:
                name = QualifiedName(function.name, namespace)
                names[name.flat] = name
                found.tools.append(_tool(function, name.flat))
            else:
                found.ignored.append(function.name or function.type)
    return found._replace(names=names)


def sealed(reasoning: str) -> str:
    """ReasoningConfig as an opaque text that a client sends back; it is its own, and no secret."""
    return SEALED + base64.b64encode(reasoning.encode()).decode()


def unsealed(text: str | None) -> str:
    """The reasoning in such a text; nothing where another server wrote it."""
    if not text or not text.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


# Items.


def messages_of(items: Sequence[Item]) -> list[Message]:
    """The items as messages; what an assistant did in one turn becomes one of them."""
    messages: list[dict[str, Any]] = []
    last = -1  # how far the assistant's turn has got
    for index, item in enumerate(items):
        where = f"input[{index}]"
        rank = _rank(item)
        if rank is None:
            messages.append(_other(item, where))
        else:
            if last < 0 or rank < last or rank == last == RANKS["message"]:
                messages.append({"role": "assistant", "content": ""})
            _add(messages[-1], item, where)
        last = -1 if rank is None else rank
    return list(messages)


def _kind(item: Item) -> str:
    return item.type or "message"


def _rank(item: Item) -> int | None:
    """Where in an assistant's turn this stands; None for what others say."""
    kind = _kind(item)
    return RANKS.get(kind) if kind != "message" or item.role == "assistant" else None


def _add(message: dict[str, Any], item: Item, where: str) -> None:
    match _kind(item):
        case "reasoning":
            if reasoning := _reasoning(item):
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        case "function_call":
            message.setdefault("tool_calls", []).append(_call(item, where))
        case _:
            message["content"] += text_of(item.content, f"{where}.content")


def _reasoning(item: Item) -> str:
    parts = [] if isinstance(item.content, str) else item.content or []
    return "".join(part.text or "" for part in parts) or unsealed(item.encrypted_content)


def _call(item: Item, where: str) -> Mapping[str, Any]:
    if item.call_id is None or item.name is None:
        raise BadField(f"{where} needs a call_id and a name.", where)
    name = QualifiedName(item.name, item.namespace).flat
    function = {"name": name, "arguments": item.arguments or "{}"}
    return {"id": item.call_id, "type": "function", "function": function}


def _other(item: Item, where: str) -> dict[str, Any]:
    """A message of anybody but the assistant, or what a function gave back."""
    kind = _kind(item)
    if kind == "function_call_output":
        if item.call_id is None:
            raise BadField(f"{where}.call_id is needed and not there.", f"{where}.call_id")
        output = text_of(item.output, f"{where}.output")
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    if kind != "message":
        raise BadField(f"{where} is of type {kind!r}, which is not known here.", f"{where}.type")
    if item.role is None:
        raise BadField(f"{where}.role is needed and not there.", f"{where}.role")
    if item.content is None:
        raise BadField(f"{where}.content is needed and not there.", f"{where}.content")
    return {"role": item.role, "content": content_of(item.content, f"{where}.content")}


# Tools and wishes.


def _tool(tool: ResponseTool, name: str) -> Tool:
    fields = {"name": name, "description": tool.description, "parameters": tool.parameters}
    function = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(body: InputRequest, tools: OfferedTools) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice or "auto"
    if isinstance(choice, NamedChoice):
        name = QualifiedName(choice.name or "", choice.namespace).flat
        if choice.type != "function" or name not in tools.names:
            raise BadField("tool_choice names a tool that is not offered.", "tool_choice")
        return ToolChoice("required", name, parallel)
    if choice == "required" and not tools.tools:
        raise BadField("tool_choice is required and there are no tools; send some.", "tool_choice")
    return ToolChoice(choice, None, parallel)


def _format(wanted: TextFormat) -> Format | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Format(json=True)
    if wanted.schema_ is None:
        where = "text.format.schema"
        raise BadField(f"{where} is needed for json_schema and not there.", where)
    return Format(json=True, schema=wanted.schema_)


def _sampling(body: ResponsesRequest, settings: Settings) -> Sampling:
    return Sampling(
        max_tokens=body.max_output_tokens,
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_p=body.top_p or 1.0,
        top_logprobs=_top_logprobs(body),
    )


def _top_logprobs(body: ResponsesRequest) -> int | None:
    """Who names how many wants them, and who asks for them to be included."""
    wanted = body.top_logprobs or LOGPROBS in (body.include or ())
    return body.top_logprobs or 0 if wanted else None

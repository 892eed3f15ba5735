"""OpenAI's responses: what requests may hold, and their conversion for the engine."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from json import dumps
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.http.body import (
    IGNORED,
    JsonInput,
    Members,
    TokenCount,
)
from keepwarm.server.http.content import (
    AnyPart,
    ContentPart,
    SkippedContent,
    content_of,
    text_of,
)
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    FormatFields,
    OpenAISampling,
    ThinkingFields,
    UnsupportedFields,
    format_of,
    thinking_of,
)
from keepwarm.server.http.tools import (
    TEXT_INPUT,
    ChosenMode,
    allowed_tools,
    custom_arguments,
    function_tool,
)
from keepwarm.server.openai.common import sampling_of
from keepwarm.server.openai.shapes import has_grammar
from keepwarm.text.request import SYSTEM_ROLES, Format, Message, Request, Sampling, Tool, ToolChoice
from keepwarm.text.tools import function_call

MAX_METADATA = 16
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
HEEDED_INCLUDES = frozenset({LOGPROBS, ENCRYPTED_REASONING})

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA)]
# Of a function text or parts; other tools have objects of their own.
Output = Annotated[str | Members[ContentPart] | Any, Field(union_mode="left_to_right")]


# Types of items whose fields are read.
READ_ITEMS = frozenset(
    {
        *("message", "reasoning", "compaction", "function_call", "function_call_output"),
        *("custom_tool_call", "custom_tool_call_output"),
    }
)


class Item(JsonInput):
    """A message, a function call or its output, reasoning of an earlier answer.

    Other items, as calls of tools that run elsewhere, become a note.
    """

    model_config = ConfigDict(extra="allow")  # returned as it was sent

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Members[AnyPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: Output = None
    encrypted_content: str | None = None
    status: Any = None

    @property
    def is_reference(self) -> bool:
        """Whether it is the id of a stored item; clients may leave out the type."""
        if self.type is None:
            return self.id is not None and self.model_fields_set <= {"id", "type"}
        return self.type == "item_reference"


class UnreadItem(Item):
    """An item of any other type: whatever it holds is returned as it was sent."""

    type: str
    role: Any = None
    content: Any = None
    call_id: Any = None
    name: Any = None
    namespace: Any = None
    arguments: Any = None
    input: Any = None
    encrypted_content: Any = None


def _tag(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "unread" if isinstance(kind, str) and kind and kind not in READ_ITEMS else "read"


AnyItem = Annotated[
    Annotated[Item, Tag("read")] | Annotated[UnreadItem, Tag("unread")], Discriminator(_tag)
]


class ResponseTool(JsonInput):
    """A function, a tool whose input is text (`custom`), or a namespace of these.

    Other tools are ignored; the receipt lists them.
    """

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Arguments follow the schema.")
    format: Any = Field(default=None, description="A grammar is not enforced.")
    tools: Members[ResponseTool] | None = None

    def ignored(self) -> Iterable[str]:
        return ("format",) if has_grammar(self.format) else ()


class NamedChoice(JsonInput):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Members[NamedChoice] | None = Field(
        default=None, description="Of `allowed_tools`: only these are offered."
    )


class TextFormat(JsonInput):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="An answer always follows the schema.")


class TextConfig(JsonInput):
    format: TextFormat | None = None


class InputRequest(PromptBody, FormatFields, ThinkingFields, UnsupportedFields):
    """The fields that determine the prompt."""

    input: str | Members[AnyItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Members[ResponseTool] | None = None
    tool_choice: ChosenMode | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    prompt_cache_key: str | None = Field(default=None, description="Names the conversation.")
    conversation: Any = Field(default=None, description="Rejected: use previous_response_id.")
    prompt: Any = Field(default=None, description="Rejected: send the text itself.")


class ResponsesRequest(InputRequest, OpenAISampling):
    max_output_tokens: TokenCount | None = Field(
        default=None,
        validation_alias=AliasChoices("max_output_tokens", "max_completion_tokens", *MAX_TOKENS),
    )
    include: Members[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tool_calls: int | None = Field(
        default=None, ge=1, description="Of tools that run on servers; here none do."
    )
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = Field(
        default=None, description="Return at once; the response is generated in the background."
    )
    service_tier: Annotated[str | None, IGNORED] = Field(
        default=None, description="There is one: `default`."
    )
    safety_identifier: str | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="`auto`: drop the oldest turns if the context is exceeded."
    )
    user: str | None = None

    def ignored(self) -> Iterable[str]:
        return () if HEEDED_INCLUDES.issuperset(self.include or ()) else ("include",)


class CompactRequest(InputRequest):
    max_output_tokens: int | None = Field(default=None, ge=1, description="Of the summary.")


REASONING_PREFIX = "keepwarm1:"  # of encoded reasoning that clients send back
NAMESPACE_SEPARATOR = "__"  # between namespace and function name

# The order of items within one assistant turn; an item of a lower rank begins a new turn.
RANKS = {"reasoning": 0, "message": 1, "compaction": 1, "function_call": 2, "custom_tool_call": 2}
CALLED = ("function", "custom")  # types of tools that the client runs
OUTPUT = "_output"  # types of tool results end with it
READ_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})


class QualifiedName(NamedTuple):
    """A function's name as the client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False  # its input is text

    @property
    def flat(self) -> str:
        """The name as the model knows it."""
        return f"{self.namespace}{NAMESPACE_SEPARATOR}{self.name}" if self.namespace else self.name


class OfferedTools(NamedTuple):
    tools: list[Tool]
    names: Mapping[str, QualifiedName]  # by flat name
    ignored: list[str]


def request_of(
    body: InputRequest, items: Sequence[Item], fields: Request, settings: Settings
) -> Request:
    """The engine request; `items` includes those of previous responses."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    unread = SkippedContent.of(settings, "input", [_role(item) for item in items])
    messages = [*instructions, *messages_of(items, unread)]
    if not messages or (items and all(isinstance(item, UnreadItem) for item in items)):
        raise BadField("input has nothing to read; send at least one message.", "input")
    tools = _allowed(body.tool_choice, offered_tools(body.tools or ()).tools)
    own = {"text.format": _format(body.text.format) if body.text and body.text.format else None}
    thinking = thinking_of(body)
    return replace(
        fields,
        messages=messages,
        unread=unread.kinds,
        tools=tools,
        tool_choice=_tool_choice(body),
        thinking=thinking.switch,
        template_options=thinking.options,
        format=format_of(body, **own),
        sampling=_sampling(body) if isinstance(body, ResponsesRequest) else Sampling(),
    )


def items_of(content: str | Sequence[Item] | None) -> list[Item]:
    if isinstance(content, str):
        return [Item(type="message", role="user", content=content)]
    return list(content or ())


def offered_tools(tools: Sequence[ResponseTool]) -> OfferedTools:
    """The functions among these tools; tools that run on OpenAI's servers are ignored."""
    found = OfferedTools([], {}, [])
    names: dict[str, QualifiedName] = {}
    for tool in tools:
        inner = tool.tools or () if tool.type == "namespace" else (tool,)
        namespace = tool.name if tool.type == "namespace" else None
        for function in inner:
            if function.name and function.type in CALLED:
                name = QualifiedName(function.name, namespace, function.type == "custom")
                names[name.flat] = name
                found.tools.append(_tool(function, name.flat))
            else:
                found.ignored.append(function.name or function.type)
    return found._replace(names=names)


def encode_reasoning(reasoning: str) -> str:
    """Reasoning as an opaque string that the client sends back; encoded, not encrypted."""
    return REASONING_PREFIX + base64.b64encode(reasoning.encode()).decode()


def decode_reasoning(text: str | None) -> str:
    """The reasoning in such a string; empty if another server wrote it."""
    if not text or not text.startswith(REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(text.removeprefix(REASONING_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


# Items


def _role(item: Item) -> str | None:
    """Whose an item is; one of an unknown type is nobody's turn."""
    if _rank(item) is not None:
        return "assistant"
    if _kind(item) == "message":
        return item.role
    return "tool" if _kind(item).endswith(OUTPUT) else SYSTEM_ROLES[0]


def messages_of(items: Sequence[Item], unread: SkippedContent) -> list[Message]:
    """The items as messages; the items of one assistant turn become one message."""
    messages: list[dict[str, Any]] = []
    last = -1  # rank of the previous item in the assistant's turn
    for index, item in enumerate(items):
        where = f"input[{index}]"
        rank = _rank(item)
        if _is_broken_call(item):
            continue
        if rank is None:
            messages.append(_other(item, where, unread))
        else:
            if last < 0 or rank < last or rank == last == RANKS["message"]:
                messages.append({"role": "assistant", "content": ""})
            _add(messages[-1], item, where, unread)
        last = -1 if rank is None else rank
    return list(messages)


def _is_broken_call(item: Item) -> bool:
    """A call of a stream that was cut off or malformed: a message with its text follows."""
    return _kind(item) == "function_call" and item.status == "incomplete"


def _kind(item: Item) -> str:
    return item.type or "message"


def _rank(item: Item) -> int | None:
    """The item's rank in an assistant turn; None if it is not the assistant's."""
    kind = _kind(item)
    if kind == "message":
        return RANKS[kind] if item.role == "assistant" else None
    return RANKS.get(kind, RANKS["message"] if kind.endswith("_call") else None)


def _add(message: dict[str, Any], item: Item, where: str, unread: SkippedContent) -> None:
    match _kind(item):
        case "reasoning":
            if reasoning := _reasoning(item):
                message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
            elif not (item.encrypted_content or REASONING_PREFIX).startswith(REASONING_PREFIX):
                unread.leave_out("reasoning")  # another server's
        case "function_call" | "custom_tool_call":
            message.setdefault("tool_calls", []).append(_call(item, where))
        case "compaction":
            summary = decode_reasoning(item.encrypted_content)  # empty: another server's
            message["content"] += summary or unread.note(item.type or "", where)
        case "message":
            message["content"] += text_of(item.content, f"{where}.content", unread)
        case kind:
            message["content"] += unread.note(kind, where)


def _reasoning(item: Item) -> str:
    parts = [] if isinstance(item.content, str) else item.content or []
    return "".join(part.text or "" for part in parts) or decode_reasoning(item.encrypted_content)


def _call(item: Item, where: str) -> Mapping[str, Any]:
    if item.call_id is None or item.name is None:
        raise BadField(f"{where} needs both call_id and name.", where)
    name = QualifiedName(item.name, item.namespace).flat
    arguments = item.arguments if isinstance(item.arguments, str) else dumps(item.arguments or {})
    if _kind(item) == "custom_tool_call":
        arguments = custom_arguments(item.input or "")
    return function_call(item.call_id, name, arguments or "{}")


def _other(item: Item, where: str, unread: SkippedContent) -> dict[str, Any]:
    """A message that is not the assistant's, the output of a function, or a note."""
    kind = _kind(item)
    if kind in READ_OUTPUTS:
        if item.call_id is None:
            raise BadField(f"{where}.call_id is required but missing.", f"{where}.call_id")
        return {
            "role": "tool",
            "tool_call_id": item.call_id,
            "content": _output(item, where, unread),
        }
    if kind != "message":
        text = item.output if isinstance(item.output, str) else unread.note(kind, where)
        return {"role": "user", "content": text}
    if item.role is None:
        raise BadField(f"{where}.role is required but missing.", f"{where}.role")
    if item.content is None:
        raise BadField(f"{where}.content is required but missing.", f"{where}.content")
    return {"role": item.role, "content": content_of(item.content, f"{where}.content", unread)}


def _output(item: Item, where: str, unread: SkippedContent) -> str:
    output, where = item.output, f"{where}.output"
    parts = [] if output is None or isinstance(output, str) else output
    if not isinstance(parts, list) or not all(isinstance(part, ContentPart) for part in parts):
        raise BadField(f"{where} is neither text nor a list of parts.", where)
    return text_of(output, where, unread)


# Tools and options


def _allowed(choice: object, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools that `allowed_tools` leaves, if it is chosen."""
    if not isinstance(choice, NamedChoice) or choice.type != "allowed_tools":
        return tools
    return allowed_tools(tools, [_flat(tool) for tool in choice.tools or () if tool.name])


def _flat(tool: NamedChoice) -> str:
    return QualifiedName(tool.name or "", tool.namespace).flat


def _tool(tool: ResponseTool, name: str) -> Tool:
    parameters = TEXT_INPUT if tool.type == "custom" else tool.parameters
    return function_tool(name, tool.description, parameters, tool.strict)


def _tool_choice(body: InputRequest) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice or "auto"
    if isinstance(choice, NamedChoice) and choice.type == "allowed_tools":
        choice = choice.mode or "auto"
    if not isinstance(choice, NamedChoice):
        return ToolChoice(choice, parallel=parallel)
    name = _flat(choice) if choice.type in CALLED else ""
    return ToolChoice("required", name, parallel)


def _format(wanted: TextFormat) -> Format | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Format(json=True)
    if wanted.schema_ is None:
        where = "text.format.schema"
        raise BadField(f"{where} is missing; the format json_schema needs it.", where)
    return Format(json=True, schema=wanted.schema_, strict=bool(wanted.strict))


def _sampling(body: ResponsesRequest) -> Sampling:
    return sampling_of(body, body.max_output_tokens, _top_logprobs(body))


def _top_logprobs(body: ResponsesRequest) -> int | None:
    """Logprobs are wanted if a number is given or `include` names them."""
    wanted = body.top_logprobs or LOGPROBS in (body.include or ())
    return body.top_logprobs or 0 if wanted else None

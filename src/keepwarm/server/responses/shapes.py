"""JSON of OpenAI's responses: what requests may hold, validated by pydantic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag

from keepwarm.server.http.body import IGNORED, Checked, JsonInput, Members, TokenCount, TopP
from keepwarm.server.http.content import AnyPart, ContentPart
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    REPETITION_PENALTY,
    STOP,
    FormatFields,
    ThinkingFields,
    UnsupportedFields,
)
from keepwarm.server.http.tools import ChosenMode
from keepwarm.server.openai.shapes import MAX_STOPS, has_grammar

MAX_METADATA = 16
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
HEEDED_INCLUDES = frozenset({LOGPROBS, ENCRYPTED_REASONING})

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
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


class ResponsesRequest(InputRequest):
    max_output_tokens: TokenCount | None = Field(
        default=None,
        validation_alias=AliasChoices("max_output_tokens", "max_completion_tokens", *MAX_TOKENS),
    )
    stop: str | Annotated[Checked[str], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, validation_alias=STOP
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=10, validation_alias=REPETITION_PENALTY
    )
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: TopP | None = None
    include: Members[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
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
    conversation: Any = Field(default=None, description="Rejected: use previous_response_id.")
    prompt: Any = Field(default=None, description="Rejected: send the text itself.")
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="`auto`: drop the oldest turns if the context is exceeded."
    )
    user: str | None = None

    def ignored(self) -> Iterable[str]:
        return () if HEEDED_INCLUDES.issuperset(self.include or ()) else ("include",)


class CompactRequest(InputRequest):
    max_output_tokens: int | None = Field(default=None, ge=1, description="Of the summary.")

"""Anthropic's JSON: what requests may hold, validated by pydantic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from keepwarm.server.http.body import Checked, JsonInput, Members, TokenCount, TopK, TopP
from keepwarm.server.http.content import text_part
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    REPETITION_PENALTY,
    FormatFields,
    ThinkingFields,
    UnsupportedFields,
)

MAX_STOPS = 64
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
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[TokenCount, Field(le=LARGEST)] = Field(
        validation_alias=AliasChoices(*MAX_TOKENS, "max_completion_tokens")
    )
    stream: bool | None = None
    stop_sequences: Checked[str] | None = Field(
        default=None,
        max_length=MAX_STOPS,
        validation_alias=AliasChoices("stop_sequences", "stop"),
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=10, validation_alias=REPETITION_PENALTY
    )
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: TopP | None = None
    top_k: Annotated[TopK, Field(le=LARGEST)] | None = None
    thread: Any = Field(default=None, description="Rejected: send all messages.")

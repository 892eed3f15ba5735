"""OpenAI's JSON: what requests may hold, validated by pydantic."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from keepwarm.server.http.body import (
    IGNORED,
    MAX_MEMBERS,
    Checked,
    JsonInput,
    Members,
    TokenCount,
    TopK,
)
from keepwarm.server.http.content import AnyPart
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    FormatFields,
    OpenAISampling,
    ThinkingFields,
    UnsupportedFields,
)
from keepwarm.server.http.tools import ChosenMode

MAX_CHOICES = 16
MAX_ANSWERS = 128  # of all prompts of a request
Prompts = str | Checked[str] | Checked[int] | Checked[Checked[int]]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _as_json(given: object) -> object:
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else given


class FunctionCall(JsonInput):
    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = Field(
        description="JSON, as the model generated it."
    )


class ToolCallIn(JsonInput):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(JsonInput):
    name: str
    input: str


class CustomToolCallIn(JsonInput):
    """A call of a tool whose input is text; in the prompt its arguments are `{"input": …}`."""

    id: str
    type: Literal["custom"]
    custom: CustomCall


class ChatMessage(JsonInput):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Members[AnyPart] | None = None
    name: str | None = None
    tool_calls: Members[ToolCallIn | CustomToolCallIn] | None = None
    function_call: FunctionCall | None = Field(default=None, description="As before tools.")
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(JsonInput):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema.")
    strict: bool | None = Field(default=None, description="Arguments follow the schema.")


class ChatTool(JsonInput):
    type: Literal["function"]
    function: Function


def has_grammar(format_: object) -> bool:
    """Whether the input of a custom tool has a grammar, which is not enforced."""
    return isinstance(format_, dict) and format_.get("type") not in (None, "text")


class Custom(JsonInput):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    format: Any = Field(default=None, description="A grammar is not enforced.")

    def ignored(self) -> Iterable[str]:
        return ("format",) if has_grammar(self.format) else ()


class CustomChatTool(JsonInput):
    """A tool whose input is text."""

    type: Literal["custom"]
    custom: Custom


class FunctionName(JsonInput):
    name: str


class NamedTool(JsonInput):
    type: Literal["function"]
    function: FunctionName


class NamedCustomTool(JsonInput):
    type: Literal["custom"]
    custom: FunctionName


class AllowedNames(JsonInput):
    mode: Literal["auto", "required"]
    tools: Members[NamedTool | NamedCustomTool] = Field(min_length=1)


class AllowedTools(JsonInput):
    """Only these of the tools are offered."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class StreamOptions(JsonInput):
    include_usage: bool | None = None


class BaseCompletionRequest(PromptBody, OpenAISampling, FormatFields, UnsupportedFields):
    """The fields that chat and text completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    top_k: TopK | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    logit_bias: dict[str, Bias] | None = Field(
        default=None, max_length=MAX_MEMBERS, description="Keys are token ids."
    )
    prompt_cache_key: str | None = Field(default=None, description="Names the conversation.")
    user: Annotated[str | None, IGNORED] = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def ignored(self) -> Iterable[str]:
        return ("stream_options",) if self.wants_usage and not self.stream else ()


class ShowsLogprobs(JsonInput):
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(BaseCompletionRequest, ThinkingFields, ShowsLogprobs):
    messages: Members[ChatMessage] = Field(min_length=1)
    max_tokens: TokenCount | None = Field(default=None, validation_alias=AliasChoices(*MAX_TOKENS))
    max_completion_tokens: TokenCount | None = None
    tools: Members[ChatTool | CustomChatTool] | None = None
    tool_choice: ChosenMode | NamedTool | NamedCustomTool | AllowedTools | None = None
    functions: Members[Function] | None = Field(default=None, description="Use `tools`.")
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = Field(
        default=None, description="The last message is the beginning of the answer."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="False only with `continue_final_message`."
    )


class CompletionRequest(BaseCompletionRequest):
    prompt: Prompts
    max_tokens: TokenCount | None = Field(
        default=None, validation_alias=AliasChoices(*MAX_TOKENS)
    )  # 16
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="Needs a model with fill-in tokens.")
    best_of: int | None = Field(default=None, ge=1, description="Must equal `n`.")


class EmbeddingRequest(PromptBody):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: little-endian floats of 32 bits."
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Keep this many numbers and scale to length 1 again."
    )
    prompt_name: str | None = Field(
        default=None, description="One of the model's own prompts, put before each text."
    )

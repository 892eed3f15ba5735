"""OpenAI's JSON: what requests may hold, validated by pydantic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from keepwarm.server.http.body import (
    IGNORED,
    MAX_MEMBERS,
    Checked,
    JsonInput,
    Members,
    Refused,
    TokenCount,
    TopK,
    TopP,
)
from keepwarm.server.http.content import ContentPart
from keepwarm.server.http.request_fields import PromptBody

MAX_CHOICES = 16
MAX_ANSWERS = 128  # of all prompts of a request
MAX_STOPS = 16
MAX_TOKENS = AliasChoices("max_tokens", "n_predict", "max_new_tokens")
Prompts = str | Checked[str] | Checked[int] | Checked[Checked[int]]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class FunctionCall(JsonInput):
    name: str
    arguments: str = Field(description="JSON, as the model generated it.")


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
    content: str | Members[ContentPart] | None = None
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


class JsonSchema(JsonInput):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="An answer always follows the schema.")


class ResponseFormat(JsonInput):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="Of `json_object`, as other servers take it."
    )


class StructuredOutputs(JsonInput):
    """vLLM's: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[Checked[str], Field(min_length=1, max_length=MAX_MEMBERS)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(JsonInput):
    include_usage: bool | None = None


class GuidedOutputs(JsonInput):
    """vLLM's fields before `structured_outputs`."""

    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Checked[str], Field(min_length=1, max_length=MAX_MEMBERS)] | None = (
        None
    )
    guided_grammar: str | None = None


class UnsupportedFields(JsonInput):
    """What other servers take to constrain an answer, and this one cannot do."""

    stop_token_ids: Refused = None
    min_tokens: Refused = None
    ignore_eos: Refused = None
    bad_words: Refused = None
    chat_template: Refused = None
    documents: Refused = None


class BaseCompletionRequest(PromptBody, GuidedOutputs, UnsupportedFields):
    """The fields that chat and text completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | Annotated[Checked[str], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, validation_alias=AliasChoices("stop", "stop_sequences")
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy. Default: see `/v1/models`."
    )
    top_p: TopP | None = None
    top_k: TopK | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=10,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = Field(
        default=None, max_length=MAX_MEMBERS, description="Keys are token ids."
    )
    prompt_cache_key: str | None = Field(default=None, description="Names the conversation.")
    user: Annotated[str | None, IGNORED] = None
    grammar: str | None = Field(default=None, description="Grammar of the answer, in GBNF or Lark.")
    json_schema: dict[str, Any] | None = Field(default=None, description="As llama.cpp takes it.")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="As vLLM takes it."
    )
    format: Literal["json", ""] | dict[str, Any] | None = Field(
        default=None, description="As Ollama takes it."
    )

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def ignored(self) -> Iterable[str]:
        return ("stream_options",) if self.wants_usage and not self.stream else ()


class ReasoningOptions(JsonInput):
    effort: str | None = None


class ThinkingOptions(JsonInput):
    type: Literal["enabled", "disabled", "auto"]


class ShowsLogprobs(JsonInput):
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class ChatRequest(BaseCompletionRequest, ShowsLogprobs):
    messages: Members[ChatMessage] = Field(min_length=1)
    max_tokens: TokenCount | None = Field(default=None, validation_alias=MAX_TOKENS)
    max_completion_tokens: TokenCount | None = None
    response_format: ResponseFormat | None = None
    tools: Members[ChatTool | CustomChatTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools | None
    ) = None
    functions: Members[Function] | None = Field(default=None, description="Use `tools`.")
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = Field(
        default=None, description="`effort` is another `reasoning_effort`."
    )
    enable_thinking: bool | None = Field(
        default=None, validation_alias=AliasChoices("enable_thinking", "think")
    )
    thinking: bool | ThinkingOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = Field(
        default=None, description="The last message is the beginning of the answer."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="False only with `continue_final_message`."
    )


class CompletionRequest(BaseCompletionRequest):
    prompt: Prompts
    max_tokens: TokenCount | None = Field(default=None, validation_alias=MAX_TOKENS)  # 16
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

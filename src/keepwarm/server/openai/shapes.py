"""OpenAI's JSON: requests, validated by pydantic, and responses, as typed dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.server.http.body import (
    MAX_MEMBERS,
    UNHEEDED,
    Checked,
    JsonInput,
    Members,
    TokenCount,
    TopK,
    TopP,
)
from keepwarm.server.http.content import ContentPart
from keepwarm.server.http.receipts import ReceiptOut
from keepwarm.server.http.request_fields import KeepwarmOptions

MAX_CHOICES = 16
MAX_ANSWERS = 128  # of all prompts of a request
MAX_STOPS = 16
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
    strict: Annotated[bool | None, UNHEEDED] = Field(
        default=None, description="Arguments follow the schema where a tool is forced."
    )


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

    def unheeded(self) -> Iterable[str]:
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


class BaseCompletionRequest(JsonInput):
    """The fields that chat and text completions share."""

    model: str | None = Field(
        default=None,
        description="One of `/v1/models`. Any other is the first, or refused with strict_model.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = None
    stop: str | Annotated[Checked[str], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 is greedy. Default: see `/v1/models`."
    )
    top_p: TopP | None = None
    top_k: TopK | None = Field(default=None, description="0 or -1: all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = Field(
        default=None, max_length=MAX_MEMBERS, description="Keys are token ids."
    )
    prompt_cache_key: str | None = Field(default=None, description="Names the conversation.")
    user: Annotated[str | None, UNHEEDED] = None
    grammar: str | None = Field(default=None, description="Grammar of the answer, in GBNF or Lark.")
    json_schema: dict[str, Any] | None = Field(default=None, description="As llama.cpp takes it.")
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="As vLLM takes it."
    )
    keepwarm: KeepwarmOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def unheeded(self) -> Iterable[str]:
        return ("stream_options",) if self.wants_usage and not self.stream else ()


class ChatRequest(BaseCompletionRequest):
    messages: Members[ChatMessage] = Field(min_length=1)
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Members[ChatTool | CustomChatTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | NamedTool | NamedCustomTool | AllowedTools | None
    ) = None
    functions: Members[Function] | None = Field(default=None, description="Use `tools`.")
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = Field(
        default=None, description="The last message is the beginning of the answer."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="False only with `continue_final_message`."
    )


class CompletionRequest(BaseCompletionRequest):
    prompt: Prompts
    max_tokens: TokenCount | None = None  # 16
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="Needs a model with fill-in tokens.")
    best_of: int | None = Field(default=None, ge=1, description="Must equal `n`.")


class TopLogprobOut(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class LogprobOut(TopLogprobOut):
    top_logprobs: list[TopLogprobOut]


class ChatLogprobs(TypedDict):
    content: list[LogprobOut]
    refusal: None


class FunctionCallOut(TypedDict):
    name: str
    arguments: str


class ToolCallOut(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCallOut


class CustomOut(TypedDict):
    name: str
    input: str


class CustomToolCallOut(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CustomOut


class ChatMessageOut(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallOut | CustomToolCallOut]]
    function_call: NotRequired[FunctionCallOut]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    keepwarm: ReceiptOut


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage
    keepwarm: ReceiptOut


class SamplingOut(TypedDict):
    """What holds where a request is silent."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class ModelOut(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int | None  # null: not known before it is loaded
    shares_batches: bool | None  # false: its answers are decoded one by one; null: not tried yet
    sampling: SamplingOut
    loaded: bool  # false: the first request that names it waits until it is


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelOut]


class ClaudeModelOut(TypedDict):
    """A model as Anthropic's API shows it."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ClaudeModelList(TypedDict):
    data: list[ClaudeModelOut]
    has_more: bool
    first_id: str | None
    last_id: str | None


class OpenAIErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorOut(TypedDict):
    error: OpenAIErrorDetail

"""Ollama's JSON: requests, validated by pydantic, and responses, as typed dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from keepwarm.server.http.body import UNHEEDED, Checked, JsonInput, Members, TopK, TopP, Whole
from keepwarm.server.http.receipts import ReceiptOut
from keepwarm.server.http.request_fields import KeepwarmOptions
from keepwarm.server.openai.shapes import MAX_STOPS, Function, LogprobOut


def _lower(role: object) -> object:
    return role.lower() if isinstance(role, str) else role


class OllamaOptions(JsonInput):
    """What is honoured; all other options are named in the receipt."""

    num_predict: Whole | None = Field(default=None, description="Negative: to the context's end.")
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy.")
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Whole | None = Field(default=None, description="-1: a random one.")
    stop: str | Annotated[Checked[str], Field(max_length=MAX_STOPS)] | None = None
    repeat_penalty: float | None = Field(default=None, gt=0)
    repeat_last_n: Whole | None = Field(default=None, description="0: no penalties; -1: all.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def unheeded(self) -> Iterable[str]:
        """A penalty looks at all tokens, or none."""
        return () if self.repeat_last_n in (None, 0, -1) else ("repeat_last_n",)


class OllamaFunctionCall(JsonInput):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(JsonInput):
    id: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(JsonInput):
    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_lower)
    ]
    content: str | None = None
    thinking: str | None = None
    images: Members[str] | None = Field(default=None, description="Noted or rejected.")
    tool_calls: Members[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(JsonInput):
    type: Literal["function"] = "function"
    function: Function


class NamedOllamaRequest(JsonInput):
    """A request to a model, which is loaded for it."""

    model: str = Field(min_length=1, description="One of `/api/tags`; `:latest` may be left out.")
    keep_alive: float | str | None = Field(
        default=None,
        description="Seconds, or a duration as `10m`: how long the model stays loaded, at least. "
        "Negative: for good. 0: until it is idle, which needs the admin key where there are keys.",
    )
    keepwarm: KeepwarmOptions | None = None


class BaseOllamaRequest(NamedOllamaRequest):
    """The fields that chat and generate share."""

    stream: bool | None = Field(default=None, description="Lines of JSON, unless false.")
    format: Literal["json", ""] | dict[str, Any] | None = Field(
        default=None, description="`json`, or a JSON schema."
    )
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    truncate: bool | None = Field(
        default=None, description="False: a conversation that is too long is an error."
    )


class OllamaChatRequest(BaseOllamaRequest):
    messages: Members[OllamaMessage] = Field(
        default_factory=list, description="None: the model is only loaded, or unloaded."
    )
    tools: Members[OllamaTool] | None = None


class OllamaGenerateRequest(BaseOllamaRequest):
    prompt: str | None = Field(
        default=None, description="None: the model is only loaded, or unloaded."
    )
    suffix: str | None = Field(default=None, description="Needs a model with fill-in tokens.")
    system: str | None = None
    template: str | None = Field(default=None, description="Rejected: the model has its own.")
    context: Checked[int] | None = Field(default=None, description="Rejected: use `/api/chat`.")
    raw: bool | None = Field(default=None, description="The prompt is not put into a template.")
    images: Members[str] | None = Field(default=None, description="Noted or rejected.")


class OllamaEmbedRequest(NamedOllamaRequest):
    input: str | Checked[str]
    truncate: bool | None = Field(
        default=None, description="False: a text that is too long is an error."
    )
    dimensions: int | None = Field(default=None, ge=1)


class OllamaOldEmbedRequest(NamedOllamaRequest):
    """As before `/api/embed`."""

    prompt: str


class OllamaShowRequest(JsonInput):
    model: str | None = None
    name: str | None = Field(default=None, description="The same, for older clients.")
    verbose: Annotated[bool | None, UNHEEDED] = Field(
        default=None, description="Ignored: the tokenizer's tables are not shown."
    )


class OllamaPullRequest(OllamaShowRequest):
    stream: bool | None = Field(default=None, description="Lines of JSON, unless false.")
    insecure: Annotated[bool | None, UNHEEDED] = Field(
        default=None, description="Ignored: certificates are always checked."
    )


class OllamaReceipt(ReceiptOut):
    dropped_messages: NotRequired[int]  # the oldest ones, because the context is too short


class OllamaFunctionOut(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallOut(TypedDict):
    id: str
    function: OllamaFunctionOut


class OllamaMessageOut(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCallOut]]


class OllamaEnd(TypedDict):
    """What an answer, and the last line of a stream, has; durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[LogprobOut]]
    keepwarm: NotRequired[OllamaReceipt]


class OllamaChatOut(OllamaEnd):
    message: OllamaMessageOut


class OllamaGenerateOut(OllamaEnd):
    response: str
    thinking: NotRequired[str]


class OllamaEmbedOut(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    keepwarm: ReceiptOut


class OllamaOldEmbedOut(TypedDict):
    embedding: list[float]


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelOut(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int  # bytes of its files
    digest: str  # of its config, and the names and sizes of its files
    details: OllamaDetails


class OllamaModels(TypedDict):
    models: list[OllamaModelOut]


class OllamaLoadedModel(TypedDict):
    name: str
    model: str
    size: int  # bytes of its weights
    size_vram: int
    digest: str
    details: OllamaDetails
    expires_at: str
    context_length: int


class OllamaLoadedModels(TypedDict):
    models: list[OllamaLoadedModel]


class OllamaShowOut(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    version: str  # of the API of Ollama that is spoken here
    keepwarm: str


class OllamaStatus(TypedDict):
    status: str


class OllamaErrorOut(TypedDict):
    error: str

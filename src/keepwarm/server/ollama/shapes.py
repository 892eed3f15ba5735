"""Ollama's JSON: what requests may hold, validated by pydantic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from keepwarm.server.http.body import IGNORED, Checked, JsonInput, Members, TopK, TopP, Whole
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    REPETITION_PENALTY,
    STOP,
    FormatFields,
    ThinkingFields,
    UnsupportedFields,
)
from keepwarm.server.openai.shapes import MAX_STOPS, Function, ShowsLogprobs


def _lower(role: object) -> object:
    return role.lower() if isinstance(role, str) else role


class OllamaOptions(JsonInput):
    """What is honoured; all other options are named in the receipt."""

    num_predict: Whole | None = Field(
        default=None,
        description="Negative: to the context's end.",
        validation_alias=AliasChoices("num_predict", *MAX_TOKENS),
    )
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy.")
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Whole | None = Field(default=None, description="-1: a random one.")
    stop: str | Annotated[Checked[str], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, validation_alias=STOP
    )
    repeat_penalty: float | None = Field(default=None, gt=0, validation_alias=REPETITION_PENALTY)
    repeat_last_n: Whole | None = Field(default=None, description="0: no penalties; -1: all.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def ignored(self) -> Iterable[str]:
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


class NamedOllamaRequest(PromptBody):
    """A request to a model, which is loaded for it."""

    model: str = Field(min_length=1, description="One of `/api/tags`; `:latest` may be left out.")
    keep_alive: float | str | None = Field(
        default=None,
        description="Seconds, or a duration as `10m`: how long the model stays loaded, at least. "
        "Negative: for good. 0: until it is idle, which needs the admin key where there are keys.",
    )


class BaseOllamaRequest(
    NamedOllamaRequest, FormatFields, ThinkingFields, UnsupportedFields, ShowsLogprobs
):
    """The fields that chat and generate share."""

    stream: bool | None = Field(default=None, description="Lines of JSON, unless false.")
    options: OllamaOptions | None = None
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
    verbose: Annotated[bool | None, IGNORED] = Field(
        default=None, description="Ignored: the tokenizer's tables are not shown."
    )


class OllamaPullRequest(OllamaShowRequest):
    stream: bool | None = Field(default=None, description="Lines of JSON, unless false.")
    insecure: Annotated[bool | None, IGNORED] = Field(
        default=None, description="Ignored: certificates are always checked."
    )

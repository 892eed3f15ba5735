"""Ollama's requests: what they may hold, and their conversion for the engine."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.http.body import IGNORED, Checked, JsonInput, Members, TopK, TopP, Whole
from keepwarm.server.http.content import SkippedContent
from keepwarm.server.http.request_fields import PromptBody
from keepwarm.server.http.synonyms import (
    MAX_TOKENS,
    REPETITION_PENALTY,
    STOP,
    FormatFields,
    Stops,
    ThinkingFields,
    UnsupportedFields,
    format_of,
    thinking_of,
)
from keepwarm.server.openai.common import SEEDS, stops_of, top_logprobs_of
from keepwarm.server.openai.completions import FillIn
from keepwarm.server.openai.shapes import Function, ShowsLogprobs
from keepwarm.text.request import Message, Request, Sampling, Tool
from keepwarm.text.tools import function_call


def _lower(role: object) -> object:
    return role.lower() if isinstance(role, str) else role


class OllamaOptions(JsonInput):
    """What is honoured; all other options are named in the receipt."""

    num_predict: Whole | None = Field(
        default=None,
        description="Negative: to the context's end; 0: no answer.",
        validation_alias=AliasChoices("num_predict", *MAX_TOKENS),
    )
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy.")
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: Whole | None = Field(default=None, description="-1: a random one.")
    stop: Stops | None = Field(default=None, validation_alias=STOP)
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


UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_DURATION = 64  # characters
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")


def chat_request(
    body: OllamaChatRequest,
    messages: Sequence[OllamaMessage],
    fields: Request,
    settings: Settings,
) -> Request:
    """`messages` are those of the body, or the newer ones of them."""
    unread = SkippedContent.of(settings, "messages", [message.role for message in messages])
    return replace(
        _common(body, fields),
        messages=list(_messages(messages, unread)),
        partial_answer=_is_partial(messages),
        unread=unread.kinds,
        tools=_tools(body),
    )


def generate_request(
    body: OllamaGenerateRequest,
    fields: Request,
    settings: Settings,
    fill_in: Callable[[], FillIn],
) -> Request:
    """A prompt as a conversation of one message; raw, or to be filled in, as it is."""
    _check(body)
    common = _common(body, fields)
    prompt = body.prompt or ""
    if body.suffix:
        return replace(common, prompt=fill_in().prompt(prompt, body.suffix))
    if body.raw:
        return replace(common, prompt=prompt)
    unread = SkippedContent("" if settings.skip_unreadable else "images")
    texts = [prompt, *_notes(body.images or (), "images", unread)]
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": "\n".join(texts)}]
    return replace(common, messages=messages, unread=unread.kinds)


def _check(body: OllamaGenerateRequest) -> None:
    if body.template:
        raise BadField("template is not supported: the model has its own; omit it.", "template")
    if body.context:
        raise BadField(
            "context is not supported; send the conversation as messages to /api/chat.", "context"
        )
    if body.raw and (body.system or body.images):
        raise BadField("raw cannot be combined with system or images; send one of them.", "raw")


def _common(body: BaseOllamaRequest, fields: Request) -> Request:
    """With the fields that both kinds fill in."""
    thinking = thinking_of(body)
    return replace(
        fields,
        thinking=thinking.switch,
        template_options=thinking.options,
        format=format_of(body),
        sampling=_sampling(body),
    )


# Options


def _sampling(body: BaseOllamaRequest) -> Sampling:
    options = body.options or OllamaOptions()
    n, seed = options.num_predict, options.seed
    is_penalised = options.repeat_last_n != 0
    return Sampling(
        max_tokens=None if n is None or n < 0 else n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty if is_penalised else 1.0,
        presence_penalty=(options.presence_penalty or 0.0) * is_penalised,
        frequency_penalty=(options.frequency_penalty or 0.0) * is_penalised,
        seed=None if seed is None or seed == -1 else seed % SEEDS,
        top_logprobs=top_logprobs_of(body),
        stop=stops_of(options.stop),
    )


def keep_alive_s(body: NamedOllamaRequest) -> float | None:
    """How long the model is to stay loaded; None if the request does not say."""
    duration = body.keep_alive
    if duration is None:
        return None
    seconds = _seconds(duration) if isinstance(duration, str) else duration
    if seconds is None:
        raise BadField(
            "keep_alive is not a duration; send seconds, or text such as 10m or 1h30m.",
            "keep_alive",
        )
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    text = text.strip()
    if len(text) > LONGEST_DURATION:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    seconds = sum(float(n) * UNITS_S[unit] for n, unit in re.findall(_PART, found[2]))
    return -seconds if found[1] == "-" else seconds


# Messages


def _tools(body: OllamaChatRequest) -> list[Tool]:
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    return [{"type": "function", "function": function} for function in functions]


def _is_partial(messages: Sequence[OllamaMessage]) -> bool:
    """Whether the last message is the beginning of the answer."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _messages(messages: Sequence[OllamaMessage], unread: SkippedContent) -> Iterator[Message]:
    """Calls without ids get some, the same every time; results belong to calls in their order."""
    n_calls = 0
    waiting: list[tuple[str, str]] = []  # calls without a result: name and id
    for index, message in enumerate(messages):
        notes = _notes(message.images or (), f"messages[{index}].images", unread)
        texts = [*filter(None, [message.content]), *notes]
        fields: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
        if message.role == "developer":
            fields["role"] = "system"
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            fields["tool_calls"] = [
                _call(call, n) for n, call in enumerate(message.tool_calls, n_calls)
            ]
            n_calls += len(message.tool_calls)
            waiting = [(call["function"]["name"], call["id"]) for call in fields["tool_calls"]]
        if message.role == "tool":
            fields |= _result_of(message, waiting)
        yield fields


def _notes(images: Sequence[str], where: str, unread: SkippedContent) -> list[str]:
    return [unread.note("image", f"{where}[{index}]") for index in range(len(images))]


def _call(call: OllamaToolCall, number: int) -> dict[str, Any]:
    """Ids of nine letters and digits, because some templates refuse all others."""
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    return function_call(call.id or f"call{number:05d}", call.function.name, arguments)


def _result_of(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """The name and id of the call whose result a message is; the call waits no longer.

    Some clients send the id of a call with its result, but not with the call itself.
    """
    by_id = [each for each in waiting if each[1] == message.tool_call_id]
    by_name = [each for each in waiting if message.tool_name in (None, each[0])]
    call = next(iter(by_id + by_name), None)
    if call is None:
        named = {"name": message.tool_name, "tool_call_id": message.tool_call_id}
        return {key: value for key, value in named.items() if value is not None}
    waiting.remove(call)
    return {"name": call[0], "tool_call_id": call[1]}

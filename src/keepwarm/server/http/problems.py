"""Error responses: OpenAI's format, Ollama's under `/api`, Anthropic's for its clients."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired

from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from keepwarm import errors

OTHER_TYPE = ("_type", "literal_error", "missing")  # ends of pydantic's types of errors
OLLAMA_PATH = "/api/"
CLAUDE_HEADER = "anthropic-version"  # that all of its clients send
ANTHROPIC_PATH = re.compile(r"/v1(/agents/[^/]+(/v1)?)?/messages(/.*)?")

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CODES: Sequence[tuple[type[errors.KeepwarmError], str]] = (
    (errors.ContextTooLong, "context_length_exceeded"),
    (errors.UnknownModel, "model_not_found"),
    (errors.UnknownAgent, "agent_not_found"),
    (errors.NoThreads, "thread_unsupported_request"),  # the SDK then sends all messages
    (errors.TooLarge, "request_too_large"),
    (errors.Refused, "invalid_api_key"),
    (errors.Forbidden, "forbidden"),
    (errors.Busy, "rate_limit_exceeded"),
    (errors.TimedOut, "timeout"),
    (errors.Overloaded, "overloaded"),
    (errors.Stopping, "shutting_down"),
    (errors.StillLoading, "model_loading"),
)
REFUSAL_S = 0.25  # before a 429: clients that try again at once keep the event loop from others
RETRY_AFTER_S = {503: 5.0, 504: 5.0}  # the model is being replaced, or the server is overloaded
UNEXPECTED = "The server failed on this request; see its log. Other requests are not affected."


class OpenAIErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorOut(TypedDict):
    error: OpenAIErrorDetail


class AnthropicErrorCode(TypedDict):
    error_code: str


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[AnthropicErrorCode]


class AnthropicErrorOut(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaErrorOut(TypedDict):
    error: str


def error_docs(form: type) -> dict[int | str, dict[str, Any]]:
    """The error responses of an API, for the OpenAPI document."""
    return {
        "4XX": {"model": form, "description": "The request is invalid or refused."},
        "5XX": {"model": form, "description": "The server failed or is shutting down."},
    }


class Overflow(NamedTuple):
    """A prompt that is too long, in the sentences by which clients know to shorten it."""

    n_tokens: int
    most: int  # of a prompt: the context, less one token of the answer

    @property
    def openai(self) -> str:
        return (
            f"This model's maximum context length is {self.most + 1} tokens. However, your "
            f"messages resulted in {self.n_tokens} tokens, and the answer needs at least one. "
            "Please reduce the length of the messages."
        )

    @property
    def anthropic(self) -> str:
        return f"prompt is too long: {self.n_tokens} tokens > {self.most} maximum"

    @property
    def ollama(self) -> str:
        return (
            f"the input length exceeds the context length: {self.n_tokens} tokens, and the model "
            f"reads at most {self.most}"
        )


class Problem(NamedTuple):
    """An error, independent of the API's format."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    overflow: Overflow | None = None


def problem_of(error: BaseException) -> Problem:
    """Keepwarm's errors carry a message for the client; others may quote data and are hidden."""
    if not isinstance(error, errors.KeepwarmError):
        return Problem(500, UNEXPECTED)
    code = next((code for kind, code in CODES if isinstance(error, kind)), None)
    param = error.param if isinstance(error, errors.BadField) else None
    overflow = (
        Overflow(error.n_tokens, error.most) if isinstance(error, errors.ContextTooLong) else None
    )
    return Problem(error.status, str(error), code, param, _retry_after_s(error), overflow)


def _retry_after_s(error: errors.KeepwarmError) -> float | None:
    """Seconds until a retry may succeed; None if it will not."""
    if isinstance(error, errors.Busy):
        return error.retry_after_s
    return RETRY_AFTER_S.get(error.status)


def http_problem(status: int, detail: str, method: str, path: str) -> Problem:
    """An error raised by the web framework."""
    sentences = {
        400: "The body cannot be parsed as JSON; send UTF-8 with less nesting and shorter numbers.",
        404: f"There is no endpoint {path}; see /docs.",
        405: f"{path} does not support {method}; see /docs.",
    }
    return Problem(status, sentences.get(status, f"{detail} ({path})."))


def is_anthropic(scope: Scope) -> bool:
    """Whether the client speaks Anthropic's API, or asks for a path of it."""
    return CLAUDE_HEADER in Headers(scope=scope) or bool(ANTHROPIC_PATH.fullmatch(scope["path"]))


def openai_body(problem: Problem) -> dict[str, Any]:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    if problem.status == 429:
        kind = "rate_limit_error"
    return {
        "error": {
            "message": problem.overflow.openai if problem.overflow else problem.message,
            "type": kind,
            "param": problem.param,
            "code": problem.code,
        }
    }


def anthropic_body(problem: Problem) -> dict[str, Any]:
    usual = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(problem.status, usual)
    message = problem.overflow.anthropic if problem.overflow else problem.message
    error: dict[str, Any] = {"type": kind, "message": message}
    if problem.code:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error}


def ollama_body(problem: Problem) -> dict[str, Any]:
    """Clients know a model that is missing by the words `model` and `not found`."""
    message = problem.overflow.ollama if problem.overflow else problem.message
    is_unknown = problem.code == "model_not_found"
    return {"error": f"model not found: {message}" if is_unknown else message}


def body_for(scope: Scope, problem: Problem) -> dict[str, Any]:
    """The error in the format of the API that this request is of."""
    if scope["path"].startswith(OLLAMA_PATH):
        return ollama_body(problem)
    return anthropic_body(problem) if is_anthropic(scope) else openai_body(problem)


class ProblemResponse(Response):
    """An error response; the request's `state` has its problem afterwards, for the journal."""

    media_type = "application/json"

    def __init__(self, scope: Scope, problem: Problem) -> None:
        body = json.dumps(body_for(scope, problem))
        super().__init__(body, status_code=problem.status, headers=_headers(problem))
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["problem"] = self._problem
        if self._problem.status == 429:
            state.get("release", bool)()
            await asyncio.sleep(REFUSAL_S)
        await super().__call__(scope, receive, send)


def _headers(problem: Problem) -> dict[str, str]:
    if problem.retry_after_s is not None:
        return {"Retry-After": str(max(1, math.ceil(problem.retry_after_s)))}
    return {"WWW-Authenticate": "Bearer"} if problem.status == 401 else {}


def validation_problem(reasons: Sequence[Mapping[str, Any]], body: object) -> Problem:
    """A validation error of pydantic, as one sentence that names the field."""
    field = max(reasons, key=_depth)["loc"][:2]
    of_field = [each for each in reasons if each["loc"][:2] == field]
    # For a field of several types, report the error of the type that was sent.
    first = max(of_field, key=lambda each: (_depth(each), not each["type"].endswith(OTHER_TYPE)))
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "it cannot be parsed")
        return Problem(400, f"The body is not valid JSON ({why}).")
    source, *parts = first["loc"]
    if not parts:
        return Problem(400, f"The {source} is not a JSON object; send one as application/json.")
    param = _param(parts, body, first["type"] == "missing") if source == "body" else str(parts[-1])
    return Problem(400, f"The field {param} is invalid: {_reason(first)}.", None, param)


def _depth(reason: Mapping[str, Any]) -> int:
    return len(reason["loc"])


def _reason(first: Mapping[str, Any]) -> str:
    if first["type"] == "missing":
        return "it is required but missing"
    if first["type"] in {"too_short", "string_too_short"} and not first.get("input"):
        return "it is empty"
    message = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return message[:1].lower() + message[1:]


def _param(parts: Sequence[str | int], body: object, missing: bool) -> str:
    """The field's path as a client writes it, without the names of pydantic's union branches."""
    name, value = "", body
    for index, part in enumerate(parts):
        if _holds(value, part):
            value = value[part]  # type: ignore[index]
        elif not (missing and index == len(parts) - 1):
            continue
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name or "body"


def _holds(value: object, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(value, list) and part < len(value)
    return isinstance(value, Mapping) and part in value

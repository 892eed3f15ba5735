"""Routes, and JSON that comes in: refuses what a parser accepts and later code cannot handle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
)
from starlette.routing import compile_path

from keepwarm.errors import BadInput, TooLarge
from keepwarm.server.http.limits import UPLOADS
from keepwarm.server.http.problems import OpenAIErrorOut, error_docs

MAX_DEPTH = 100  # levels; schema parsers give up at 128
NESTED = (dict, list)
MAX_VALUES = 300_000  # in one body: a million take a second to check
MAX_MEMBERS = 10_000  # of one list that is checked element by element
LONG = 16 << 10  # bytes; a shorter body cannot hold many values
MARKS = b",[{"
_UNCOUNTED = bytes(set(range(256)) - set(MARKS))
SMALLEST, LARGEST = -(2**63), 2**64 - 1  # of whole numbers: what fits 64 bits
ARGUMENTS = ("input", "arguments")  # of a call, beside its name
LEAST_TOP_P = 1e-9
TO_THE_END = -1  # of the context, as llama.cpp and vLLM write it
MAX_IGNORED = 32  # names in a receipt, which is a header too
EMPTY: tuple[object, ...] = ("", [], {})  # ask for nothing
MEDIA = ("image", "audio", "video")  # in the types of parts that a receipt names as unread
IGNORED = "ignored"  # marks a field that is checked, shown perhaps, and has no effect
_FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

ANALYSED = frozenset(APIRoute.__annotations__) | {"app"}


Fields: TypeAlias = dict[str, Any]  # of a JSON object


class JsonInput(BaseModel):
    """A JSON object that comes in: types are not coerced, unknown fields are named, not read."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    def ignored(self) -> Iterable[str]:
        """Fields that are read and, with the values that they have, change nothing."""
        return ()


def _whole(value: object) -> object:
    """A whole number that is written with a decimal point, as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole: TypeAlias = Annotated[int, BeforeValidator(_whole)]
# As other servers take them: a top_p of 0 is the likeliest token, a top_k of -1 all tokens.
TopP: TypeAlias = Annotated[
    float, Field(ge=0, le=1), AfterValidator(lambda given: given or LEAST_TOP_P)
]
TopK: TypeAlias = Annotated[
    int, BeforeValidator(_whole), Field(ge=-1), AfterValidator(lambda given: max(given, 0))
]


def _refuse(given: object) -> object:
    if given:
        raise ValueError("it would change the answer, and this server cannot do it; leave it out")
    return given


def _refuse_media(given: object) -> object:
    return given if given == ["text"] else _refuse(given)


# A field that other servers heed, and that constrains the answer.
Refused: TypeAlias = Annotated[Any, AfterValidator(_refuse), IGNORED]
# Kinds of output that are asked for.
TextOnly: TypeAlias = Annotated[Any, AfterValidator(_refuse_media), IGNORED]

TokenCount: TypeAlias = Annotated[
    int,
    BeforeValidator(_whole),
    Field(ge=TO_THE_END, description="-1: up to the end of the context; 0: no answer."),
]

T = TypeVar("T")
# A list of which the first bad element is reported, not all of them.
Checked: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
Members: TypeAlias = Annotated[list[T], Field(fail_fast=True, max_length=MAX_MEMBERS)]


def token_limit(given: int | None) -> int | None:
    """A `TokenCount` for the engine; None is up to the end of the context."""
    return None if given == TO_THE_END else given


def check_structure(body: bytes) -> None:
    """Refuse a body of very many values before it is parsed, which would hold up everyone."""
    if len(body) < LONG or _n_marks(body) <= MAX_VALUES:
        return
    texts = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    n_quotes = texts.count(b'"')
    if n_quotes <= 2 * MAX_VALUES:
        between = b"".join(texts.split(b'"')[::2])
        if len(between.translate(None, _UNCOUNTED)) <= MAX_VALUES:
            return
    raise TooLarge(f"The body has more than {MAX_VALUES:,} values; send fewer.")


def _n_marks(body: bytes) -> int:
    """How often the marks occur that begin or separate values, in texts too. NumPy counts them
    without the interpreter.
    """
    found = np.frombuffer(body, np.uint8)
    return sum(int(np.count_nonzero(found == mark)) for mark in MARKS)


async def check_json(request: Request) -> None:
    """Reject other encodings, lone surrogates, numbers that are too large, and deep nesting."""
    if "json" not in request.headers.get("content-type", "").lower() or request.url.path in UPLOADS:
        return
    body = await request.body()
    with suppress(ValueError, RecursionError):  # FastAPI reports what cannot be parsed
        value = await request.json()  # cached by Starlette: not parsed again
        request.state.given_body = value
        slot = getattr(request.state, "slot", None)  # of a request with a prompt
        check = partial(_check, value, body)
        await slot.build(check) if slot else check()


def _check(value: object, body: bytes) -> None:
    if not _is_utf8(body):
        raise BadInput("The body is not UTF-8, the encoding of JSON; send it in UTF-8.")
    check_values(value)
    if b"\\" in body and _SURROGATE.search(body):
        _check_characters(value)


def _is_utf8(body: bytes) -> bool:
    """Python's parser takes UTF-16 too, which has zero bytes in JSON, and surrogates unescaped."""
    try:
        return "\0" not in body.decode()
    except UnicodeDecodeError:
        return False


def given_body(request: Request) -> object:
    """The body as it came; None if it is not JSON."""
    return getattr(request.state, "given_body", None)


def ignored_fields(body: BaseModel, given: object) -> tuple[str, ...]:
    """What was given and changes nothing: as `text.verbosity`, `messages[].audio`."""
    found: set[str] = set()
    known: dict[type[BaseModel], dict[str, str]] = {}  # attributes, by the field's name in JSON
    level: list[tuple[str, object, object]] = [("", body, given)]
    while level and len(found) < MAX_IGNORED:
        level = [each for one in level for each in _looked_into(*one, found, known)]
    return tuple(sorted(found)[:MAX_IGNORED])


def _looked_into(
    path: str,
    read: object,
    given: object,
    found: set[str],
    known: dict[type[BaseModel], dict[str, str]],
) -> Iterable[tuple[str, object, object]]:
    """Note the fields of an object that are not read; what is inside of those that are."""
    if isinstance(read, list) and isinstance(given, list):
        yield from ((f"{path}[]", *both) for both in zip(read, given, strict=True))
    if not (isinstance(read, BaseModel) and isinstance(given, dict)) or _is_media(given):
        return
    if isinstance(read, JsonInput):
        found.update(_inside_of(path, name) for name in read.ignored())
    names = known.get(type(read)) or known.setdefault(type(read), _names(type(read)))
    for name, value in given.items():
        where = _inside_of(path, name if _FIELD_NAME.fullmatch(name) else "?")
        if name in names:
            if isinstance(value, NESTED):
                yield where, getattr(read, names[name]), value
        elif value is not None and value not in EMPTY:
            found.add(where)


def _inside_of(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_media(given: dict[str, object]) -> bool:
    kind = given.get("type")
    return isinstance(kind, str) and any(word in kind for word in MEDIA)


def _names(model: type[BaseModel]) -> dict[str, str]:
    heeded = [item for item in model.model_fields.items() if IGNORED not in item[1].metadata]
    names = {field.alias or name: name for name, field in heeded}
    for name, field in heeded:
        if isinstance(field.validation_alias, AliasChoices):
            names |= {str(each): name for each in field.validation_alias.choices}
    return names


class LateRoute(APIRoute):
    """Analysed at its first request, or for the API's schema.

    FastAPI builds validators for all models of a route: a few milliseconds for each, but a third
    of a second for all of them, while a server starts. Until then a route can only be matched.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = compile_path(path)
        self.methods = set(options["methods"] or ["GET"])
        self._analyse = partial(super().__init__, path, endpoint, **options)

    def __getattr__(self, name: str) -> Any:
        """What FastAPI finds out about a route; Python calls this for what is not there yet."""
        if name not in ANALYSED:
            raise AttributeError(f"A route has no attribute {name!r}.")
        self._analyse()
        return vars(self)[name]


def api_router(
    prefix: str = "",
    *,
    tags: list[str | Enum],
    errors: type = OpenAIErrorOut,
    route_class: type[APIRoute] = LateRoute,
) -> APIRouter:
    """A router that checks the bodies it gets; `errors` is the form of its error responses."""
    return APIRouter(
        prefix=prefix,
        tags=tags,
        responses=error_docs(errors),
        dependencies=[Depends(check_json)],
        route_class=route_class,
    )


def check_values(value: object, *, is_text: bool = False) -> None:
    """Goes level by level, so that deep nesting cannot exhaust the stack.

    `is_text`: the arguments of a call, which become text; models write numbers of any size.
    """
    level = _nested([value], is_text)
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [each for outer in level for each in _nested(_inside(outer, is_text), is_text)]
    if level:
        raise BadInput(f"The body nests deeper than {MAX_DEPTH} levels; send a flatter one.")


def _inside(outer: dict[str, object] | list[object], is_text: bool) -> Iterable[object]:
    """All but the arguments of a call, which are checked here: at their end they may be as deep as
    those that a model writes.
    """
    if isinstance(outer, list):
        return outer
    if not is_text and isinstance(outer.get("name"), str):
        outer = dict(outer)
        for name in ARGUMENTS:
            if isinstance(outer.get(name), dict):
                check_values(outer.pop(name), is_text=True)
    return outer.values()


def _nested(values: Iterable[object], is_text: bool) -> list[dict[str, object] | list[object]]:
    """The objects and lists among these values; numbers are checked."""
    found = []
    for value in values:
        if isinstance(value, NESTED):
            found.append(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadInput(
                "The body contains a number that is not finite; JSON has no NaN or infinity."
            )
        elif isinstance(value, int) and not (is_text or SMALLEST <= value <= LARGEST):
            raise BadInput(
                "The body contains a whole number that does not fit 64 bits; send a smaller one, "
                "or one with an exponent."
            )
    return found


def _check_characters(value: object) -> None:
    """Reject lone surrogates, which JSON can express and tokenizers cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            "The body contains a lone surrogate (half a character); send valid Unicode."
        ) from error

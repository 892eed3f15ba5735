"""What an answer must be: OpenAI's `response_format`, and the fields of llama.cpp and vLLM."""

from __future__ import annotations

import json
import re

from keepwarm.errors import BadField
from keepwarm.server.openai.shapes import (
    BaseCompletionRequest,
    ChatRequest,
    ResponseFormat,
    StructuredOutputs,
)
from keepwarm.text.request import Format


def format_of(body: BaseCompletionRequest) -> Format | None:
    """The one format that a request asks for, by any of the fields for it."""
    wanted = {
        "grammar": Format(grammar=body.grammar) if body.grammar else None,
        "json_schema": None if body.json_schema is None else Format(schema=body.json_schema),
        "structured_outputs": _structured(body.structured_outputs),
    }
    if isinstance(body, ChatRequest):
        wanted["response_format"] = _response_format(body.response_format)
    given = {name: each for name, each in wanted.items() if each is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise BadField(f"{names} cannot be combined; send one.", next(iter(given)))
    return next(iter(given.values()), None)


def _response_format(wanted: ResponseFormat | None) -> Format | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Format(json=True) if wanted.schema_ is None else Format(schema=wanted.schema_)
    schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
    if schema is None:
        where = "response_format.json_schema.schema"
        raise BadField(f"{where} is missing; the format json_schema needs it.", where)
    return Format(json=True, schema=schema)


def _structured(wanted: StructuredOutputs | None) -> Format | None:
    if wanted is None:
        return None
    forms = {
        "json": None if wanted.json_ is None else Format(schema=_schema(wanted.json_)),
        "regex": None if wanted.regex is None else Format(grammar=_matching(wanted.regex)),
        "choice": None if wanted.choice is None else Format(grammar=_one_of(wanted.choice)),
        "grammar": None if wanted.grammar is None else Format(grammar=wanted.grammar),
        "json_object": Format(json=True) if wanted.json_object else None,
    }
    given = [each for each in forms.values() if each is not None]
    if len(given) != 1:
        raise BadField(
            f"structured_outputs needs exactly one of {', '.join(forms)}.", "structured_outputs"
        )
    return given[0]


def _schema(given: dict[str, object] | str) -> dict[str, object]:
    if isinstance(given, dict):
        return given
    where = "structured_outputs.json"
    try:
        read = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise BadField(f"{where} is not a JSON schema ({error}); change it.", where) from error
    if not isinstance(read, dict):
        raise BadField(f"{where} is not a JSON schema; send an object.", where)
    return read


def _matching(regex: str) -> str:
    """A grammar of the texts that match a regular expression from end to end."""
    plain = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(r"(?s)\\.|[/\n]", lambda found: plain.get(found[0], found[0]), regex)
    return f"start: /{escaped}/"


def _one_of(texts: list[str]) -> str:
    return f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"

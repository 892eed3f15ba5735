"""What the answers of each API show: text, tokens, receipt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx

Json = dict[str, Any]


class Shown(NamedTuple):
    """Token counts of one answer; None where the API has none."""

    prompt: int | None
    cached: int | None
    completion: int | None


def objects_of(answer: httpx.Response) -> list[Json]:
    """The JSON objects of an answer or a stream, in order."""
    if answer.headers.get("content-type", "").startswith("application/json"):
        return [json.loads(answer.read())]
    return list(parse(answer.iter_lines()))


def parse(lines: Iterable[str]) -> Iterator[Json]:
    for line in lines:
        text = line.removeprefix("data: ")
        if text.startswith("{"):
            yield json.loads(text)


def texts(found: Json) -> Iterator[str]:
    """The text in one object, of whichever API."""
    for choice in found.get("choices", ()):
        part = choice.get("message") or choice.get("delta") or choice
        yield part.get("content") or part.get("text") or ""
    for block in found.get("content", ()):
        yield block["text"]
    for item in found.get("output", ()):
        yield from (part["text"] for part in item["content"])
    if found.get("type") in ("content_block_delta", "response.output_text.delta"):
        delta = found["delta"]
        yield delta if isinstance(delta, str) else delta["text"]
    if isinstance(found.get("message"), dict) and "role" in found["message"]:  # Ollama's
        yield found["message"].get("content") or ""
    yield found.get("response", "") if isinstance(found.get("response"), str) else ""


def words(objects: Iterable[Json]) -> int:
    return len(text_of(objects).split())


def text_of(objects: Iterable[Json]) -> str:
    return "".join(text for found in objects for text in texts(found))


def last(objects: Iterable[Json], name: str) -> Json:
    """A field of the last object that has it, also inside of a response that is streamed."""
    found: Json = {}
    for each in objects:
        inner = each.get("response")
        for outer in (each, inner if isinstance(inner, dict) else {}):
            value = outer.get(name)
            found = value if isinstance(value, dict) else found
    return found


def receipt_of(objects: Iterable[Json]) -> Json:
    return last(objects, "keepwarm")


def shown(objects: list[Json]) -> Shown:
    """As the API's own fields have it."""
    usage, end = last(objects, "usage"), objects[-1]
    if "eval_count" in end:
        return Shown(end["prompt_eval_count"], None, end["eval_count"])
    if "prompt_eval_count" in end:
        return Shown(end["prompt_eval_count"], None, None)
    if "cache_read_input_tokens" in usage:
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        whole = sum(usage[part] for part in parts)
        return Shown(whole, usage["cache_read_input_tokens"], usage["output_tokens"])
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    return Shown(prompt, _cached(usage), completion)


def _cached(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached: int | None = details.get("cached_tokens")
    return cached

"""Models in the form of the API whose client asks: OpenAI's, or Anthropic's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from fastapi import Request

from keepwarm.errors import BadField
from keepwarm.server.openai.shapes import ClaudeModelList, ClaudeModelOut, ModelList, ModelOut

CLAUDE_HEADER = "anthropic-version"  # that all of its clients send
MAX_LISTED = 1000  # models in a page, as Anthropic has it


class Page(NamedTuple):
    """The part of a list that Anthropic's clients ask for."""

    limit: int | None = None
    after_id: str | None = None
    before_id: str | None = None


def list_for(
    request: Request, models: Sequence[ModelOut], page: Page
) -> ModelList | ClaudeModelList:
    if CLAUDE_HEADER not in request.headers:
        return {"object": "list", "data": list(models)}
    data, has_more = _paged([_claude(model) for model in models], page)
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": has_more, "first_id": first, "last_id": last}


def _paged(models: list[ClaudeModelOut], page: Page) -> tuple[list[ClaudeModelOut], bool]:
    """The models of a page, and whether there are more in its direction."""
    ids = [model["id"] for model in models]
    first = _index(ids, page.after_id, "after_id") + 1 if page.after_id else 0
    end = _index(ids, page.before_id, "before_id") if page.before_id else len(ids)
    found = models[first:end]
    limit = page.limit or len(found)
    shown = found[-limit:] if page.before_id else found[:limit]
    return shown, len(shown) < len(found)


def _index(ids: Sequence[str], wanted: str, name: str) -> int:
    if wanted not in ids:
        raise BadField(f"{name} is no model of this server; omit it to list all.", name)
    return ids.index(wanted)


def model_for(request: Request, model: ModelOut) -> ModelOut | ClaudeModelOut:
    return _claude(model) if CLAUDE_HEADER in request.headers else model


def _claude(model: ModelOut) -> ClaudeModelOut:
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model["context_length"],
        "max_tokens": model["context_length"],
    }

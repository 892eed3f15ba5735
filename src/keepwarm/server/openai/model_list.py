"""Models in the form of the API whose client asks: OpenAI's, or Anthropic's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from fastapi import Request

from keepwarm.server.openai.shapes import ClaudeModelList, ClaudeModelOut, ModelList, ModelOut

CLAUDE_HEADER = "anthropic-version"  # that all of its clients send


def list_for(request: Request, models: Sequence[ModelOut]) -> ModelList | ClaudeModelList:
    if CLAUDE_HEADER not in request.headers:
        return {"object": "list", "data": list(models)}
    data = [_claude(model) for model in models]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


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

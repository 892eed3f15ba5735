"""Stream chunks, shared by chat and text completions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from keepwarm import __version__
from keepwarm.engine.engine import Engine
from keepwarm.server.http.problems import Problem, openai_body
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.sse import comment, frame
from keepwarm.server.openai.calls import FUNCTIONS, CallStyle
from keepwarm.server.openai.shapes import CompletionUsage
from keepwarm.text.request import Done, Progress, Usage

DONE = frame("[DONE]")


@dataclass(frozen=True)
class CompletionMeta:
    """The fields that an answer and each of its chunks begin with."""

    id: str
    created: int
    model: str
    fingerprint: str = ""
    calls: CallStyle = FUNCTIONS


class Chunks:
    """Holds back each finish reason, because the last one carries the receipt."""

    def __init__(self, kind: str, meta: CompletionMeta, usage: bool) -> None:
        fields = {"id": meta.id, "object": kind, "created": meta.created}
        fields |= {"model": meta.model, "system_fingerprint": meta.fingerprint}
        self._head = json.dumps(fields)[:-1]
        self._usage = usage
        self._held: dict[str, Any] | None = None

    def keep_alive(self, progress: Progress | None) -> bytes:
        return comment(progress)

    def problem(self, problem: Problem) -> bytes:
        return self._release() + frame(json.dumps(openai_body(problem))) + DONE

    def _hold(self, choice: dict[str, Any]) -> bytes:
        """Hold back this finish reason and release the one before it."""
        released = self._release()
        self._held = choice
        return released

    def _release(self, more: dict[str, Any] | None = None) -> bytes:
        """The chunk that was held back, if any."""
        held, self._held = self._held, None
        return self._framed({"choices": [held], **(more or {})}) if held else b""

    def _done(self, event: Done) -> bytes:
        receipt = {"keepwarm": receipt_dict(event.receipt)}
        if not self._usage:
            return self._release(receipt) + DONE
        usage = {"choices": [], "usage": usage_dict(event.usage)}
        return self._release() + self._framed(usage | receipt) + DONE

    def _framed(self, fields: dict[str, Any]) -> bytes:
        """The first fields are the same in all chunks and serialised only once."""
        return frame(f"{self._head}, {json.dumps(fields)[1:]}")


def system_fingerprint(engine: Engine) -> str:
    """Changes with the model, its KV options and the version of this server."""
    model = engine.model
    parts = [__version__, model.name, model.config, model.n_bytes, repr(engine.config.kv)]
    text = json.dumps(parts, sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"


def usage_dict(usage: Usage) -> CompletionUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }

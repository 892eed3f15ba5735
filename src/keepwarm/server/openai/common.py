"""What chat and text completions share: sampling, and the chunks of a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepwarm import __version__
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadField
from keepwarm.server.http.body import token_limit
from keepwarm.server.http.problems import Problem, openai_body
from keepwarm.server.http.sse import comment, frame, receipt_dict
from keepwarm.server.http.synonyms import OpenAISampling
from keepwarm.server.openai.shapes import (
    BaseCompletionRequest,
    ShowsLogprobs,
)
from keepwarm.text.request import Done, Progress, Result, Sampling, Usage

SEEDS = 1 << 63
MAX_DIGITS = 9  # of a token's id
MAX_SHOWN, MAX_NAMED = 40, 3  # characters of a wrong key, and wrong keys
DONE = b"data: [DONE]\n\n"


# Requests


def completion_sampling(
    body: BaseCompletionRequest, max_tokens: int | None, top_logprobs: int | None
) -> Sampling:
    """Sampling options, the same for chat and text completions."""
    return sampling_of(
        *(body, max_tokens, top_logprobs),
        top_k=body.top_k,
        min_p=body.min_p,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=None if body.seed is None else body.seed % SEEDS,
    )


def sampling_of(
    body: OpenAISampling, max_tokens: int | None, top_logprobs: int | None, **more: Any
) -> Sampling:
    """What responses have too; `more` is what they have not."""
    return Sampling(
        max_tokens=token_limit(max_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        top_logprobs=top_logprobs,
        stop=stops_of(body.stop),
        **more,
    )


def stops_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(filter(None, [given] if isinstance(given, str) else given or ()))


def top_logprobs_of(body: ShowsLogprobs) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadField("top_logprobs needs logprobs; set logprobs to true.", "top_logprobs")
    return None


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    wrong = [token for token in bias if not (token.isascii() and token.isdigit())]
    wrong += [token for token in bias if len(token) > MAX_DIGITS]
    if wrong:
        raise BadField(
            f"The keys of logit_bias must be token ids, whole numbers of up to {MAX_DIGITS} "
            f"digits, not {', '.join(repr(token[:MAX_SHOWN]) for token in wrong[:MAX_NAMED])}.",
            "logit_bias",
        )
    return {int(token): value for token, value in bias.items()}


# Answers


@dataclass(frozen=True)
class CompletionMeta:
    """The fields that an answer and each of its chunks begin with."""

    id: str
    created: int
    model: str
    fingerprint: str = ""

    def fields(self, kind: str) -> dict[str, Any]:
        fields = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return fields | {"system_fingerprint": self.fingerprint}


def whole(
    meta: CompletionMeta, kind: str, choices: Sequence[dict[str, Any]], result: Result
) -> dict[str, Any]:
    """A complete answer."""
    return {
        **meta.fields(kind),
        "choices": list(choices),
        "usage": usage_dict(result.usage),
        "keepwarm": receipt_dict(result.receipt),
    }


class Chunks:
    """Holds back each finish reason, because the last one carries the receipt."""

    def __init__(self, kind: str, meta: CompletionMeta, usage: bool) -> None:
        self._head = meta.fields(kind)
        self._usage = usage
        self._held: dict[str, Any] | None = None

    def keep_alive(self, progress: Progress | None) -> bytes:
        return comment(progress)

    def problem(self, problem: Problem) -> bytes:
        return self._release() + frame(openai_body(problem)) + DONE

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
        return frame(self._head | fields)


def system_fingerprint(engine: Engine) -> str:
    """Changes with the model, its KV options and the version of this server."""
    model = engine.model
    parts = [__version__, model.name, model.config, model.n_bytes, repr(engine.config.kv)]
    text = json.dumps(parts, sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(text.encode(), digest_size=5).hexdigest()}"


def usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }

"""A streaming client for any OpenAI-compatible server that times every piece of text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import httpx

from keepwarm.errors import KeepwarmError, Unreachable

Message: TypeAlias = Mapping[str, Any]
# Called with the arrival time in seconds of every piece of text; False ends the stream.
OnText: TypeAlias = Callable[[float], bool]

TIMEOUT = httpx.Timeout(900.0, connect=10.0)


def keep_reading(_: float) -> bool:
    return True


@dataclass(frozen=True)
class BenchRequest:
    """One conversation to be answered with greedy decoding."""

    messages: Sequence[Message]
    max_tokens: int
    policy: str | None = None  # cache policy of Keepwarm; other servers ignore it
    forbidden: Sequence[int] = ()  # stop tokens, so that answers have their full length
    on_text: OnText = keep_reading
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of the body


class ReplyToken(NamedTuple):
    """A token of an answer, where logprobs were asked for."""

    text: str
    gap: float  # to the logprob of the nearest other token


class TimedReply(NamedTuple):
    """An answer; times are seconds since the request was sent."""

    text: str
    times: tuple[float, ...]  # of every piece of text
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reused: Mapping[str, int]  # tokens by tier, if the target reports them
    tokens: tuple[ReplyToken, ...] = ()

    @property
    def ttft_s(self) -> float:
        return self.times[0] if self.times else self.total_s

    @property
    def recomputed(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]

    @property
    def token_s(self) -> float:
        """Seconds per token, the first one excluded."""
        n_tokens = max(1, self.completion_tokens - 1)
        return (self.times[-1] - self.times[0]) / n_tokens if len(self.times) > 1 else self.total_s


def gaps_between(times: Sequence[float], since: float, until: float) -> list[float]:
    """Gaps of which a part is in this time; the last may still be open."""
    return [b - a for a, b in pairwise([*times, until]) if since <= b and a < until]


class HttpClient:
    """Posts to `{base}/chat/completions`; thread-safe."""

    def __init__(self, base: str, key: str = "", model: str = "default_model") -> None:
        self._base = base.rstrip("/")
        self._model = model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.Client(timeout=TIMEOUT, headers=headers, limits=limits, trust_env=False)

    def ask(self, ask: BenchRequest) -> TimedReply:
        """The answer, up to where `on_text` returned False."""
        reader, start = _Reader(), time.perf_counter()
        with self._stream(ask) as lines:
            for line in lines:
                came = reader.read(line)
                if came and not ask.on_text(reader.note_time(time.perf_counter() - start)):
                    break
        return reader.reply(time.perf_counter() - start)

    def get(self, path: str) -> Any:
        """GET a path below the base and parse its JSON."""
        url = f"{self._base}{path}"
        try:
            response = self._http.get(url)
            if response.is_error:
                raise Unreachable(_error_answer(url, response))
            return response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(_no_answer(url, error)) from error

    @contextmanager
    def _stream(self, ask: BenchRequest) -> Iterator[Iterator[str]]:
        policy = {"X-Keepwarm-Cache": ask.policy} if ask.policy else {}
        headers = {**ask.headers, **policy}
        url = f"{self._base}/chat/completions"
        try:
            with self._http.stream("POST", url, json=self._body(ask), headers=headers) as response:
                if response.is_error:
                    raise Unreachable(_error_answer(url, response))
                yield response.iter_lines()
        except httpx.HTTPError as error:
            raise Unreachable(_no_answer(url, error)) from error

    def _body(self, ask: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(ask.messages),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **ask.more,
        }
        if ask.forbidden:
            body["logit_bias"] = {str(token): -100 for token in ask.forbidden}
        return body

    def close(self) -> None:
        self._http.close()


def _no_answer(url: str, error: Exception) -> str:
    return f"{url} does not answer ({str(error) or type(error).__name__}); is it running?"


def _error_answer(url: str, response: httpx.Response) -> str:
    text = response.read().decode(errors="replace").strip()[:200]
    return f"{url} answers {response.status_code}: {text}"


class _Reader:
    """Joins the chunks of one stream."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._times: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._reused: Mapping[str, int] = {}
        self._tokens: list[ReplyToken] = []

    def read(self, line: str) -> bool:
        """Parse a line of the stream; True if it holds text."""
        if not line.startswith("data:") or line.endswith("[DONE]"):
            return False
        chunk = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            raise KeepwarmError(f"The stream ended with an error: {json.dumps(chunk['error'])}.")
        self._usage = chunk.get("usage") or self._usage
        self._reused = (chunk.get("keepwarm") or {}).get("reused", self._reused)
        choices = chunk.get("choices") or ()
        self._tokens += [token for choice in choices for token in _tokens_of(choice)]
        text = "".join(_text_of(choice) for choice in choices)
        self._text.append(text)
        return bool(text)

    def note_time(self, seconds: float) -> float:
        self._times.append(seconds)
        return seconds

    def reply(self, total_s: float) -> TimedReply:
        usage = self._usage
        details = usage.get("prompt_tokens_details") or {}
        return TimedReply(
            "".join(self._text),
            tuple(self._times),
            total_s,
            usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
            usage.get("completion_tokens", len(self._times)),
            self._reused,
            tuple(self._tokens),
        )


def _tokens_of(choice: Mapping[str, Any]) -> Iterator[ReplyToken]:
    for token in (choice.get("logprobs") or {}).get("content") or ():
        others = [each for each in token["top_logprobs"] if each["token"] != token["token"]]
        gaps = [abs(token["logprob"] - each["logprob"]) for each in others]
        yield ReplyToken(token["token"], min(gaps, default=0.0))


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (
        delta.get("content") or ""
    )

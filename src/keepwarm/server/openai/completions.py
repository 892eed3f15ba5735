"""Text completions: prompts as text or tokens, answers in the format of OpenAI's older API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from keepwarm.config import Settings
from keepwarm.engine.answer import sum_receipts, sum_usages
from keepwarm.errors import BadField, KeepwarmError
from keepwarm.prefix.policy import Policy
from keepwarm.server.http.sse import wait_for_start
from keepwarm.server.http.synonyms import format_of
from keepwarm.server.models.host import ObservedAnswer
from keepwarm.server.openai.common import (
    Chunks,
    CompletionMeta,
    completion_sampling,
    whole,
)
from keepwarm.server.openai.logprobs import (
    joined_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from keepwarm.server.openai.shapes import (
    MAX_ANSWERS,
    CompletionRequest,
    Prompts,
)
from keepwarm.text.detokenize import Pieces
from keepwarm.text.request import (
    Choice,
    Delta,
    Done,
    Event,
    Finished,
    Outcome,
    Request,
    Result,
    Scored,
    Started,
    TokenInfo,
    ToolCallDelta,
    ToolCalled,
)

DEFAULT_MAX_TOKENS = 16


class FillIn(NamedTuple):
    """The tokens by which a model fills in text: before what precedes it, what follows, itself."""

    before: str
    after: str
    middle: str

    def prompt(self, prefix: str, suffix: str) -> str:
        return f"{self.before}{prefix}{self.after}{suffix}{self.middle}"


FILL_INS = (
    FillIn("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillIn("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    FillIn("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillIn("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
)


def fill_in_of(tokenizer: Any) -> FillIn | None:
    """How the model of this tokenizer fills in; None if it has no tokens for it."""
    known = tokenizer.get_added_vocab().keys()
    return next((each for each in FILL_INS if known >= set(each)), None)


def required_fill_in(tokenizer: Any, settings: Settings) -> FillIn:
    """How a suffix is filled in; raises the reason why it cannot be."""
    if not settings.raw_special_tokens:
        raise BadField(
            "suffix needs special tokens, and the setting raw_special_tokens keeps them out of raw "
            "prompts; omit it.",
            "suffix",
        )
    fill_in = fill_in_of(tokenizer)
    if fill_in is None:
        raise BadField("suffix needs fill-in tokens, which this model lacks; omit it.", "suffix")
    return fill_in


def requests_of(
    body: CompletionRequest, fields: Request, fill_in: Callable[[], FillIn]
) -> list[Request]:
    """One request for each prompt."""
    _check(body)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling, format_ = completion_sampling(body, max_tokens, body.logprobs), format_of(body)
    prompts = _filled_in(body, fill_in)
    n = body.n or 1
    if fields.continues and len(prompts) > 1:
        raise BadField("An agent is continued with one prompt; send one at a time.", "prompt")
    if len(prompts) * n > MAX_ANSWERS:
        raise BadField(
            f"The request asks for more than {MAX_ANSWERS} answers; send fewer prompts.", "prompt"
        )
    is_scored = bool(body.echo) and body.logprobs is not None
    request = replace(
        fields,
        sampling=sampling,
        format=format_,
        n=n,
        score_prompt=is_scored,
        policy=Policy.NO_STORE if is_scored else fields.policy,  # what is restored has no logits
    )
    return [replace(request, prompt=prompt) for prompt in prompts]


def prompts_of(prompt: Prompts, name: str = "prompt") -> list[str | list[int]]:
    """The prompts, from any of their four forms; `name` is that of the field."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadField(f"{name} is an empty list; send at least one text.", name)
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _filled_in(body: CompletionRequest, fill_in: Callable[[], FillIn]) -> list[str | list[int]]:
    """The prompts, with the suffix in the model's own format."""
    prompts, suffix = prompts_of(body.prompt), body.suffix
    if not suffix:
        return prompts
    made = fill_in()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise BadField("suffix cannot be combined with a prompt of tokens; send text.", "suffix")
    return [made.prompt(text, suffix) for text in texts]


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadField(
            "best_of is supported only if it equals n; set it to n or omit it.", "best_of"
        )
    if body.echo and body.logprobs is not None and body.suffix:
        raise BadField("echo with logprobs cannot be combined with suffix; omit one.", "echo")


def completion(
    meta: CompletionMeta, result: Result, echoed: Sequence[str], pieces: Pieces | None
) -> dict[str, Any]:
    """A complete answer; `echoed` is the text that each choice begins with."""
    choices = [
        _choice(i, choice, echo, pieces, _scored(result, i))
        for i, (choice, echo) in enumerate(zip(result.choices, echoed, strict=True))
    ]
    return whole(meta, "text_completion", choices, result)


def _scored(result: Result, choice: int) -> Sequence[TokenInfo]:
    """The tokens of this choice's prompt, if they were scored."""
    first = max((number for number in result.scored if number <= choice), default=None)
    return () if first is None else result.scored[first]


def _choice(
    index: int, choice: Choice, echo: str, pieces: Pieces | None, prompt: Sequence[TokenInfo]
) -> dict[str, Any]:
    logprobs = text_logprobs(pieces, choice.tokens, len(echo)) if pieces else None
    if logprobs and pieces and prompt:
        logprobs = joined_logprobs(prompt_logprobs(pieces, prompt, echo), logprobs)
    return {
        "index": index,
        "text": echo + choice.text,
        "logprobs": logprobs,
        "finish_reason": "length" if choice.reason == "length" else "stop",
    }


class TextStream(Chunks):
    """Chunks of text; the last has the receipt: that with the usage, or the last finish reason."""

    def __init__(
        self,
        meta: CompletionMeta,
        echoed: Sequence[str],
        usage: bool,
        pieces: Pieces | None,
        n: int = 1,
    ) -> None:
        """`echoed` has a text for each choice; `n` choices have the same prompt."""
        super().__init__("text_completion", meta, usage)
        self._n = n
        self._echoed = echoed
        self._pieces = pieces
        self._offsets = [len(echo) for echo in echoed]

    def event(self, event: Event) -> bytes:
        match event:
            case Delta():
                return self._release() + self._delta(event)
            case Finished():
                end = self._choice(event.choice, "", event.tokens)
                reason = "length" if event.reason == "length" else "stop"
                return self._hold(end | {"finish_reason": reason})
            case Scored():
                return self._prompt(event)
            case Started() if not self._pieces:
                texts = enumerate(self._echoed)
                return b"".join(self._chunk(self._choice(i, text)) for i, text in texts if text)
            case Done():
                return self._done(event)
        return b""

    def _prompt(self, event: Scored) -> bytes:
        """The prompt with its logprobs, for each of its choices."""
        assert self._pieces is not None
        frames = []
        for index in range(event.choice, event.choice + self._n):
            echo = self._echoed[index]
            logprobs = prompt_logprobs(self._pieces, event.tokens, echo)
            frames.append(self._chunk(self._choice(index, echo) | {"logprobs": logprobs}))
        return b"".join(frames)

    def _delta(self, event: Delta) -> bytes:
        if not event.text and not (self._pieces and event.tokens):
            return b""
        return self._chunk(self._choice(event.choice, event.text, event.tokens))

    def _choice(self, index: int, text: str, tokens: Sequence[TokenInfo] = ()) -> dict[str, Any]:
        logprobs = None
        if self._pieces and tokens:
            logprobs = text_logprobs(self._pieces, tokens, self._offsets[index])
            self._offsets[index] += self._pieces.n_letters(self._pieces.shown(tokens))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._framed({"choices": [choice]})


class CombinedAnswer:
    """Answers to several prompts as one: their events as they arrive, choices numbered through."""

    def __init__(self, answers: Sequence[ObservedAnswer], n: int) -> None:
        self._answers = answers
        self._n = n  # choices per answer

    def cancel(self) -> None:
        for answer in self._answers:
            answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Started and Done come when every answer has them; the first error ends the stream."""
        plans = [await wait_for_start(answer) for answer in self._answers]
        yield Started(sum_receipts([plan.receipt for plan in plans]))
        queue: asyncio.Queue[Outcome] = asyncio.Queue()
        tasks = [asyncio.create_task(self._read(i, queue)) for i in range(len(self._answers))]
        done: list[Done] = []
        try:
            while len(done) < len(tasks):
                outcome = await queue.get()
                if isinstance(outcome, KeepwarmError):
                    raise outcome
                if isinstance(outcome, Done):
                    done.append(outcome)
                else:
                    yield outcome
        finally:
            for task in tasks:
                task.cancel()
        yield Done(
            sum_usages([each.usage for each in done]), sum_receipts([each.receipt for each in done])
        )

    async def _read(self, number: int, queue: asyncio.Queue[Outcome]) -> None:
        try:
            async for event in self._answers[number]:
                queue.put_nowait(self._numbered(number, event))
        except KeepwarmError as error:
            queue.put_nowait(error)

    def _numbered(self, number: int, event: Event) -> Event:
        if isinstance(event, Scored | Delta | ToolCallDelta | ToolCalled | Finished):
            return replace(event, choice=number * self._n + event.choice)
        return event

"""One sequence: read what is new of a prompt, then answer token by token.

The ledger rule: a `LiveCache` knows the exact tokens it was fed, and nothing else is in it. After
a generation these are the prompt and every answer token but the last one: a token is fed only when
the next is asked for, so a stop token, or the token at which somebody stopped, is not in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx

from keepwarm import kv
from keepwarm.cache.manager import Capture, Manager
from keepwarm.engine.model import Model
from keepwarm.engine.prompt import common_prefix
from keepwarm.engine.sampling import Sampler, make_sampler
from keepwarm.engine.text import Detokenizer
from keepwarm.errors import BadInput, UnsupportedCache
from keepwarm.prefix.blocks import BLOCK_TOKENS

KVOptions: TypeAlias = dict[str, Any]  # of `keepwarm.kv.make_caches`


class Step(NamedTuple):
    token: int
    text: str  # what this token completes; a stop token has no text of its own
    finish_reason: str | None  # "stop", "length", or None while the answer goes on


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int  # a stop token included
    cached_tokens: int  # of the prompt, already in the cache
    prefilled_tokens: int  # of the prompt, fed to the model
    ttft_ms: float  # until the first token
    tokens_per_second: float  # after the first token; 0 where there is only one
    exact: bool  # the keys and values are unquantised


class LiveCache:
    """The caches of one sequence and the exact tokens they were fed.

    With a manager, what other sequences computed is restored, and what this one computes is kept.
    """

    def __init__(
        self,
        model: Model,
        manager: Manager | None = None,
        kv_options: KVOptions | None = None,
    ) -> None:
        self._model = model
        self._manager = manager
        self._kv_options = kv_options or {}
        self._capture: Capture | None = None
        self.tokens: list[int] = []
        self.layers = self._fresh()

    @property
    def exact(self) -> bool:
        return not kv.is_quantized(self.layers)

    def feed(self, tokens: Sequence[int], checkpoint: bool = False) -> mx.array:
        """Run the model on these tokens; the logits after the last one. A failure empties it.

        A checkpoint keeps the very place, for layers that cannot be restored in between.
        """
        try:
            logits: mx.array = self._model.module(mx.array([tokens]), cache=self.layers)
            kv.evaluate(self.layers)
        except BaseException:
            self.clear()  # some layers have the tokens and some have not
            raise
        self.tokens.extend(tokens)
        if self._capture is not None:
            self._capture.capture(self.layers, len(self.tokens), checkpoint)
        return logits[:, -1, :]

    def keep(self, tokens: Sequence[int]) -> int:
        """Keep what serves this prompt, drop the rest; the number of its tokens still held.

        One token of the prompt is always left to feed, for the model answers only what it reads.
        """
        wanted = min(common_prefix(self.tokens, tokens), len(tokens) - 1)
        excess = len(self.tokens) - wanted
        if excess and not self._trim(excess):
            self.clear()
        if self._manager is not None:
            self._restore(self._manager, tokens)
            self._capture = self._manager.open(self.tokens)
            self._capture.start_at(len(self.tokens))
        return len(self.tokens)

    def finish(self) -> None:
        """Keep the open block too, so that the next turn, or process, goes on from here."""
        if self._capture is not None and self.tokens:
            self._capture.finish(self.tokens, self.layers)

    def clear(self) -> None:
        self._capture = None
        self.tokens = []
        self.layers = self._fresh()

    @property
    def checkpoints(self) -> bool:
        """Whether some layer can be restored only where somebody took a checkpoint."""
        return self._manager is not None and self._manager.needs.checkpoints

    def _fresh(self) -> kv.Caches:
        return kv.make_caches(self._model.module, **self._kv_options)

    def _restore(self, manager: Manager, tokens: Sequence[int]) -> None:
        restored = manager.restore(tokens, beyond=len(self.tokens))
        if restored.caches is not None:
            self.layers, self.tokens = restored.caches, list(tokens[: restored.n_tokens])

    def _trim(self, n_tokens: int) -> bool:
        try:
            kv.trim(self.layers, n_tokens)
        except UnsupportedCache:
            return False
        del self.tokens[-n_tokens:]
        return True


class Generation(Iterator[Step]):
    """A running answer: iterate for its steps; `usage` tells what has happened so far."""

    def __init__(
        self,
        model: Model,
        prompt_tokens: Sequence[int],
        cache: LiveCache,
        *,
        cuts: Sequence[int],
        max_tokens: int,
        sample: Sampler,
        should_stop: Callable[[], bool],
    ) -> None:
        self.cache = cache
        self._prompt = list(prompt_tokens)
        self._room = min(max_tokens, model.n_context - len(self._prompt))
        self._stop_tokens: set[int] = model.tokenizer.eos_token_ids
        self._text = Detokenizer(model.tokenizer)
        self._sample = sample
        self._should_stop = should_stop
        self._cuts = {*cuts, len(self._prompt) - 1} if cache.checkpoints else set()
        self._n_cached = 0
        self._n_prefilled = 0
        self._times: list[float] = [perf_counter()]  # the start, then every token
        self._steps = self._run()

    def __next__(self) -> Step:
        return next(self._steps)

    def close(self) -> None:
        """End the answer here and keep what was computed; one that has ended stays ended."""
        self._steps.close()

    @property
    def usage(self) -> Usage:
        start, *made = self._times
        seconds = made[-1] - made[0] if len(made) > 1 else 0.0
        return Usage(
            prompt_tokens=len(self._prompt),
            completion_tokens=len(made),
            cached_tokens=self._n_cached,
            prefilled_tokens=self._n_prefilled,
            ttft_ms=round((made[0] - start) * 1000, 1) if made else 0.0,
            tokens_per_second=round((len(made) - 1) / seconds, 1) if seconds else 0.0,
            exact=self.cache.exact,
        )

    def _run(self) -> Generator[Step, None, None]:
        self._n_cached = self.cache.keep(self._prompt)
        try:
            logits = self._prefill()
            while logits is not None:
                step = self._step(cast("int", self._sample(logits).item()))
                yield step
                if step.finish_reason or self._should_stop():
                    return
                logits = self.cache.feed([step.token])
        finally:
            self.cache.finish()

    def _prefill(self) -> mx.array | None:
        """Feed what is new, the last token alone; the logits after it, or None when stopped."""
        logits = None
        start = self._n_cached
        for end in self._bounds():
            if self._should_stop():
                return None
            logits = self.cache.feed(self._prompt[start:end], checkpoint=end in self._cuts)
            self._n_prefilled += end - start
            start = end
            mx.clear_cache()
        return logits

    def _bounds(self) -> list[int]:
        """Where slices end: at blocks, at cuts that need a checkpoint, before the last token.

        Alone, the last token costs one row of the vocabulary's projection instead of a slice's.
        """
        last = len(self._prompt) - 1
        ends = {*range(0, last, BLOCK_TOKENS), *self._cuts, last, last + 1}
        return sorted(end for end in ends if self._n_cached < end <= last + 1)

    def _step(self, token: int) -> Step:
        self._times.append(perf_counter())
        if token in self._stop_tokens:
            return Step(token, self._text.finish(), "stop")
        text = self._text.add(token)
        if len(self._times) > self._room:
            return Step(token, text + self._text.finish(), "length")
        return Step(token, text, None)


def generate(
    model: Model,
    prompt_tokens: Sequence[int],
    *,
    cache: LiveCache | None = None,
    cuts: Sequence[int] = (),
    max_tokens: int = 512,
    temperature: float = 0.0,
    seed: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Generation:
    """Start an answer to this prompt; nothing runs until it is iterated.

    A cache is brought into line first: what it shares with the prompt is kept, only the rest is
    fed. It is changed in place and serves the next turn. `cuts` are tokens of the prompt, ends of
    messages mostly, at which later prompts may part from this one. `should_stop` is asked before
    every slice and every further token; a stopped answer ends without a finish reason.
    """
    check_options(max_tokens, temperature, seed)
    _check_length(model, len(prompt_tokens))
    return Generation(
        model,
        prompt_tokens,
        cache or LiveCache(model),
        cuts=cuts,
        max_tokens=max_tokens,
        sample=make_sampler(temperature, seed),
        should_stop=should_stop or (lambda: False),
    )


def check_options(max_tokens: int, temperature: float, seed: int | None) -> None:
    """Refuse numbers that mean nothing, before a model is loaded for them."""
    if max_tokens < 1:
        raise BadInput(f"max-tokens is {max_tokens}; it must be 1 or more.")
    if not 0 <= temperature < math.inf:
        raise BadInput(f"temperature is {temperature}; it must be a number from 0 up.")
    if seed is not None and not 0 <= seed < 2**64:
        raise BadInput(f"seed is {seed}; it must be from 0 to 2^64 - 1.")


def _check_length(model: Model, n_tokens: int) -> None:
    if not n_tokens:
        raise BadInput("The prompt is empty; say something.")
    if n_tokens >= model.n_context:
        raise BadInput(
            f"The prompt is {n_tokens:,} tokens long and {model.name} reads at most"
            f" {model.n_context - 1:,}; shorten it."
        )

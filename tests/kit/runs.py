"""Greedy runs with mlx-lm's own parts: alone, continued from a cache, and in a shared batch.

After a run of n tokens its cache holds everything that was fed: the prompt and all n tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

Cache = list[Any]
STEP = 2048


class Run(NamedTuple):
    """The result of a run: tokens, the distribution of each, and the final cache."""

    tokens: list[int]
    logprobs: mx.array  # (n, vocabulary)
    cache: Cache


class Job(NamedTuple):
    """One row of a batch: feed `rest` to a cache that already holds `held`."""

    rest: Sequence[int]
    n: int
    held: Sequence[int] = ()
    cache: Cache | None = None
    joins_at: int = 0  # how many tokens the others have generated when it is inserted


def prompt_of(n_tokens: int, seed: int = 0) -> list[int]:
    """A repeatable prompt of this length over the tiny models' vocabulary of 128."""
    return mx.random.randint(0, 128, (n_tokens,), key=mx.random.key(seed)).tolist()  # type: ignore[return-value]


def prefill(model: Any, cache: Cache, tokens: Sequence[int], step: int = STEP) -> Cache:
    """Feed tokens in slices of `step`; changes and returns the cache, evaluated."""
    for start in range(0, len(tokens), step):
        model(mx.array([list(tokens[start : start + step])]), cache=cache)
        settle(cache)
    return cache


def settle(cache: Cache) -> Cache:
    """Evaluate every array of a cache, so that it may cross threads and be copied."""
    mx.eval([c.state for c in cache])
    return cache


def cold(model: Any, prompt: Sequence[int], n: int, *, step: int = STEP) -> Run:
    """A run from an empty cache: the reference for every other run."""
    return continue_from(model, make_prompt_cache(model), prompt, n, step=step)


def continue_from(
    model: Any, cache: Cache, rest: Sequence[int], n: int, *, step: int = STEP
) -> Run:
    """Feed `rest` (at least one token) to this cache and pick n tokens; changes the cache.

    The last token is fed alone, as BatchGenerator does, so that slices compare.
    """
    prefill(model, cache, rest[:-1], step)
    logprobs = [_feed(model, cache, rest[-1])]
    tokens: list[Any] = []
    for _ in range(n):
        tokens.append(logprobs[-1].argmax().item())
        logprobs.append(_feed(model, cache, tokens[-1]))
    return _settled(tokens, logprobs[:n], cache)


def _feed(model: Any, cache: Cache, token: int) -> mx.array:
    logits: mx.array = model(mx.array([[token]]), cache=cache)[0, -1]
    return logits - mx.logsumexp(logits, keepdims=True)


def _settled(tokens: list[int], logprobs: list[mx.array], cache: Cache) -> Run:
    run = Run(tokens, mx.stack(logprobs), settle(cache))
    mx.eval(run.logprobs)
    return run


def batched(model: Any, jobs: Sequence[Job], *, step: int = STEP) -> list[Run]:
    """Run all jobs in one BatchGenerator, results in their order; donor caches stay unchanged."""
    generator = BatchGenerator(model, prefill_step_size=step)
    waiting = sorted(range(len(jobs)), key=lambda i: jobs[i].joins_at)
    rows: dict[int, int] = {}
    seen: dict[int, list[Any]] = {i: [] for i in waiting}
    n_steps = 0
    while waiting or len(rows) > sum(_finished(r) for r in seen.values()):
        while waiting and jobs[waiting[0]].joins_at <= n_steps:
            row = waiting.pop(0)
            rows[_insert(generator, jobs[row])] = row
        responses = generator.next_generated()
        for response in responses:
            seen[rows[response.uid]].append(response)
        n_steps += 1
    generator.close()
    return [_collect(seen[i]) for i in range(len(jobs))]


def _insert(generator: BatchGenerator, job: Job) -> int:
    (uid,) = generator.insert(
        [list(job.rest)],
        max_tokens=[job.n],
        caches=[job.cache],
        all_tokens=[list(job.held)],
    )
    return int(uid)


def _finished(responses: list[Any]) -> bool:
    return bool(responses) and responses[-1].finish_reason is not None


def _collect(responses: list[Any]) -> Run:
    tokens, logprobs = [r.token for r in responses], [r.logprobs for r in responses]
    return _settled(tokens, logprobs, responses[-1].prompt_cache)


class FedCounter:
    """Wraps a model and counts the tokens it is fed, padding included.

    Everything but the call is the model's own, so `make_cache` is there only if it has one.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows, length = inputs.shape
        self.shapes.append((rows, length))
        out: mx.array = self.model(inputs, *args, **kwargs)
        return out

    def __getattr__(self, name: str) -> Any:
        # Copying looks up names before __init__ has run; without this it would recurse.
        if name == "model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def fed(self) -> int:
        return sum(rows * length for rows, length in self.shapes)

    @property
    def decoded(self) -> int:
        """Tokens fed one at a time, the last prompt token among them."""
        return sum(rows for rows, length in self.shapes if length == 1)

    @property
    def prefilled(self) -> int:
        return self.fed - self.decoded

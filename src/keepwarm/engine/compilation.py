"""Compiles kernels while the engine is idle, by trial requests that need them.

On CUDA, MLX compiles a kernel when it is first needed, which takes 30 to 50 seconds on a new
machine. So what clients will likely ask for is asked before they do. The trial requests run on an
engine of their own, over a store in memory, and leave nothing but kernels and what slices of
prompts cost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeAlias

from keepwarm.cache.store import Store
from keepwarm.config import Settings
from keepwarm.device import kernels
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.errors import KeepwarmError
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.text.request import Format, Request, Sampling

LOG = logging.getLogger(__name__)
# Tokens. For quantised weights there is a kernel for up to 16, one for up to 32, one for more.
TINY, SHORT, MEDIUM, LONG = 12, 20, 300, 2600  # the last is more than one slice
ANSWER = 4
DRAWN = Sampling(ANSWER, temperature=0.7, top_p=0.9, top_k=40, top_logprobs=2)
PENALISED = Sampling(ANSWER, repetition_penalty=1.1, presence_penalty=0.1)


class TrialRequests:
    """What idle time is left for, the likeliest first; with an engine of its own meanwhile."""

    def __init__(
        self, model: Model, store: Store, config: EngineConfig, settings: Settings
    ) -> None:
        self._model = replace(model, trials=None)
        self._store, self._config, self._settings = store, config, settings
        self._left = deque(TRIALS)
        self.n_all = len(TRIALS)

    @property
    def n_left(self) -> int:
        return len(self._left)

    def run(self) -> Generator[object, None, None]:
        """Yields after each step; one that is given up is run again, from its beginning."""
        self.save()
        yield None
        with (
            self._store.scratch() as scratch,
            Engine(self._model, scratch, self._config, settings=self._settings) as engine,
        ):
            yield None
            client = TrialClient(engine)
            while self._left:
                LOG.info("compiling kernels, %d of %d", 1 + self.n_all - self.n_left, self.n_all)
                try:
                    yield from self._left[0](client)
                except KeepwarmError as error:  # clients are told when they ask for the same
                    LOG.warning("a trial request failed: %s", error)
                self._left.popleft()
                engine.call(self.save).result()  # after its last step, which may compile

    def save(self) -> None:
        """Keep what was compiled, also by clients' requests."""
        kernels.keep(self._settings.home)


class TrialClient:
    """Asks an engine for what no client asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._firsts = count(1)

    def ask(
        self,
        prompt: list[int],
        sampling: Sampling | None = None,
        format_: Format | None = None,
        policy: Policy = Policy.READ_WRITE,
    ) -> Answer:
        sampling = sampling or Sampling(ANSWER)
        return self._engine.submit(
            Request(prompt=prompt, sampling=sampling, format=format_, policy=policy)
        )

    def prompt(self, n_tokens: int) -> list[int]:
        """Always another one, and short enough for the model."""
        n_tokens = min(n_tokens, self._engine.model.n_context - 12 * ANSWER)
        first = next(self._firsts)
        return [first, *(1 + i % 100 for i in range(n_tokens - 1))]

    def clear_live(self) -> None:
        self._engine.call(self._engine.live.clear).result()


Steps: TypeAlias = Generator[object, None, None]


def twice(
    client: TrialClient,
    n_tokens: int,
    sampling: Sampling | None = None,
    format_: Format | None = None,
) -> Steps:
    """The first one compiles, the second shows what slices cost."""
    for _ in range(2):
        yield from client.ask(client.prompt(n_tokens), sampling, format_)


def again_from_memory(client: TrialClient) -> Steps:
    prompt = client.prompt(LONG)
    for end in (LONG, LONG - 300):
        client.clear_live()
        yield from client.ask(prompt[:end])


def two_at_once(client: TrialClient) -> Steps:
    """The second goes on when the first has left."""
    asked = [
        client.ask(client.prompt(n_tokens), Sampling(n_answer))
        for n_tokens, n_answer in ((SHORT, 8 * ANSWER), (MEDIUM, 12 * ANSWER))
    ]
    for answer in asked:
        yield from answer


def prompt_beside_an_answer(client: TrialClient) -> Steps:
    running = client.ask(client.prompt(SHORT), Sampling(8 * ANSWER), policy=Policy.NO_STORE)
    yield next(running)
    yield from twice(client, LONG)
    yield from running


TRIALS: tuple[Callable[[TrialClient], Steps], ...] = (
    partial(twice, n_tokens=SHORT),
    partial(twice, n_tokens=MEDIUM),
    partial(twice, n_tokens=SHORT, sampling=DRAWN),
    partial(twice, n_tokens=LONG),
    again_from_memory,
    two_at_once,
    partial(twice, n_tokens=TINY),
    prompt_beside_an_answer,
    partial(twice, n_tokens=SHORT, sampling=PENALISED, format_=Format(json=True)),
)

"""Compiles kernels before the first request, by trial requests that need them.

On CUDA, MLX compiles a kernel when it is first needed; the first answers waited for 30 to 50
seconds. The trial requests run on an engine of their own, over a store in memory, and leave nothing
but kernels and what slices of prompts cost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count

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
Report = Callable[[str], None]


def compile_kernels_if_needed(
    model: Model, store: Store, config: EngineConfig, settings: Settings, report: Report
) -> None:
    """Compile them now where MLX would compile them at run time."""
    if kernels.are_compiled():
        compile_kernels(model, store, config, settings, report)


def compile_kernels(
    model: Model, store: Store, config: EngineConfig, settings: Settings, report: Report
) -> None:
    """Compile what first requests need; `report` is called with how far it is."""
    with (
        store.scratch() as scratch,
        Engine(model, scratch, config, settings=settings) as engine,
    ):
        trials = TrialRequests(engine).all
        for number, trial in enumerate(trials, 1):
            report(f"compiling kernels, {number} of {len(trials)}")
            _run(trial)
        if model.trials:
            engine.call(model.trials.compile_known).result()
        engine.call(lambda: kernels.keep(settings.home)).result()


def _run(trial: Callable[[], None]) -> None:
    """What a model cannot do, clients are told when they ask for it."""
    try:
        trial()
    except KeepwarmError as error:
        LOG.warning("a trial request failed: %s", error)


class TrialRequests:
    """Most run twice: the first one compiles, the second shows what slices cost."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._firsts = count(1)
        drawn = Sampling(ANSWER, temperature=0.7, top_p=0.9, top_k=40, top_logprobs=2)
        penalised = Sampling(ANSWER, repetition_penalty=1.1, presence_penalty=0.1)
        self.all: tuple[Callable[[], None], ...] = (
            *(partial(self._twice, n_tokens) for n_tokens in (TINY, SHORT, MEDIUM, LONG)),
            self._again_from_memory,
            partial(self._twice, SHORT, drawn),
            partial(self._twice, SHORT, penalised, Format(json=True)),
            self._two_at_once,
            self._prompt_beside_an_answer,
        )

    def _again_from_memory(self) -> None:
        prompt = self._prompt(LONG)
        for end in (LONG, LONG - 300):
            self._engine.call(self._engine.live.clear).result()
            self._ask(prompt[:end]).result()

    def _two_at_once(self) -> None:
        """The second goes on when the first has left."""
        asked = [
            self._ask(self._prompt(n_tokens), Sampling(n_answer))
            for n_tokens, n_answer in ((SHORT, 8 * ANSWER), (MEDIUM, 12 * ANSWER))
        ]
        for answer in asked:
            answer.result()

    def _prompt_beside_an_answer(self) -> None:
        running = self._ask(self._prompt(SHORT), Sampling(8 * ANSWER), policy=Policy.NO_STORE)
        next(running)
        self._twice(LONG)
        running.result()

    def _twice(
        self, n_tokens: int, sampling: Sampling | None = None, format_: Format | None = None
    ) -> None:
        for _ in range(2):
            self._ask(self._prompt(n_tokens), sampling, format_).result()

    def _ask(
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

    def _prompt(self, n_tokens: int) -> list[int]:
        """Always another one, and short enough for the model."""
        n_tokens = min(n_tokens, self._engine.model.n_context - 12 * ANSWER)
        first = next(self._firsts)
        return [first, *(1 + i % 100 for i in range(n_tokens - 1))]

"""Engines around the kit's tiny models, which count what they are fed, and cold runs beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from keepwarm import config
from keepwarm.cache.opened import Budgets
from keepwarm.cache.rates import Rates
from keepwarm.engine.engine import Engine, EngineConfig
from keepwarm.engine.memory import MemoryConfig
from keepwarm.engine.model import Model
from keepwarm.engine.request import Choice, Request, Sampling
from keepwarm.engine.store import Store
from tests.kit.checkpoints import CORPUS, EOS, SPECIALS, tokenizer_config
from tests.kit.compare import TIE, TOLERANCE, gaps
from tests.kit.models import VOCABULARY, tiny
from tests.kit.runs import FedCounter, Run
from tests.kit.runs import cold as cold_run

N_CONTEXT = 4096
PRINTABLE = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]  # ASCII, as bytes are written
MIB = 1 << 20


class FixedRates(Rates):
    """Speeds that nothing changes, so that what is worth loading does not depend on the machine."""

    def saw_load(self, n_bytes: int, seconds: float) -> None:
        return

    def saw_prefill(self, n_tokens: int, seconds: float) -> None:
        return


def small_tokenizer() -> Tokenizer:
    """Byte level over ASCII, of exactly as many tokens as the tiny models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIALS],
        initial_alphabet=PRINTABLE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def write_tiny(directory: Path, architecture: str, module: Any) -> Path:
    """What the identity of a model is made of: weights, config and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    weights: Any = tree_flatten(module.parameters(), destination={})
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    tokenizer = small_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    described = {"model_type": architecture, "vocab_size": VOCABULARY, "eos_token_id": eos}
    (directory / "config.json").write_text(json.dumps(described))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(N_CONTEXT)))
    return directory


class Models:
    """Tiny models by architecture, each written once, all of them equal."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.module = cache(tiny)
        self._path = cache(self._write)

    def of(self, architecture: str, *, endless: bool = True) -> Model:
        """A model with a counter of its own. An endless one has no token that ends an answer."""
        path = self._path(architecture)
        tokenizer = load_tokenizer(path)
        if endless:
            tokenizer.eos_token_ids = set()
        counter = FedCounter(self.module(architecture))
        return Model(architecture, path, counter, tokenizer, {}, N_CONTEXT)

    def _write(self, architecture: str) -> Path:
        return write_tiny(self._directory / architecture, architecture, self.module(architecture))


def memory(**bytes_of: int) -> MemoryConfig:
    """Small budgets, those named changed."""
    usual = MemoryConfig(64 * MIB, 16 * MIB, 64 * MIB, 64 * MIB, 256 * MIB)
    return replace(usual, **bytes_of)


@contextmanager
def engine_on(
    model: Model,
    home: Path,
    *,
    budgets: Budgets | None = None,
    fixed_rates: bool = True,
    **options: Any,
) -> Iterator[Engine]:
    """An engine with a store of its own under `home`; both are closed. Its model counts from 0."""
    settings = config.load({"KEEPWARM_HOME": str(home)})
    options = {"memory": memory(), **options}
    budgets = budgets or Budgets(min_free_disk_bytes=0)
    with (
        Store(budgets=budgets, settings=settings) as store,
        Engine(model, store, EngineConfig(**options), settings=settings) as engine,
    ):
        lane = engine.call(lambda: engine._lanes.of(engine.config.kv, "")).result()
        if fixed_rates:
            lane.manager.rates = FixedRates()
        model.module.shapes.clear()
        yield engine


def ask(prompt: Sequence[int], n: int = 6, /, **wishes: Any) -> Request:
    """A request for n tokens after these, with their logprobs; what is no sampling is the rest's."""
    names = Sampling.__dataclass_fields__
    sampling = {name: wishes.pop(name) for name in list(wishes) if name in names}
    chosen = Sampling(**{"max_tokens": n, "top_logprobs": 20, **sampling})
    return Request(prompt=list(prompt), sampling=chosen, **wishes)


def tokens_of(choice: Choice) -> list[int]:
    return [info.token for info in choice.tokens]


@dataclass(frozen=True)
class Reference:
    """Cold runs of one model: what every answer is held against."""

    module: Any
    tolerance: float = TOLERANCE
    step: int = 2048

    def check(self, prompt: Sequence[int], choice: Choice) -> Run:
        """Fail unless a greedy answer is the cold run's, as `tests.kit.compare` defines it."""
        run = cold_run(self.module, prompt, len(choice.tokens), step=self.step)
        assert_answer(run, choice, self.tolerance)
        return run


def assert_answer(run: Run, choice: Choice, tolerance: float = TOLERANCE) -> None:
    n = len(run.tokens)
    tie = next((step for step, gap in enumerate(gaps(run)) if gap < TIE), n)
    assert tokens_of(choice)[:tie] == run.tokens[:tie]
    logprobs: Any = run.logprobs.tolist()
    for step, info in enumerate(choice.tokens[: tie + 1]):
        if info.logprob is None:
            continue
        shown = [(info.token, info.logprob), *info.top]
        worst = max(abs(logprob - logprobs[step][token]) for token, logprob in shown)
        # Written so that NaN fails too.
        assert worst <= tolerance, f"step {step}: |Δlogprob| is {worst:.3g} > {tolerance:g}"


Wait = Callable[[], bool]

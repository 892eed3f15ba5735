"""Engines with the kit's tiny models, and cold runs to compare their answers with."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from keepwarm import config
from keepwarm.cache.restore.rates import Rates, SliceCosts
from keepwarm.cache.restore.writing import Writer
from keepwarm.cache.store import Budgets, Store
from keepwarm.device.memory import MemoryConfig
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from keepwarm.engine.padding import Verdict, VerdictsFile
from keepwarm.models.load import Model
from keepwarm.text.request import Choice, Request, Sampling
from tests.kit.checkpoints import CORPUS, EOS, SPECIALS, tokenizer_config
from tests.kit.compare import TIE, TOLERANCE
from tests.kit.models import VOCABULARY, tiny
from tests.kit.runs import FedCounter

N_CONTEXT = 4096
PRINTABLE = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]  # ASCII, as bytes are written
MIB = 1 << 20
NO_VARIABLES: Mapping[str, str] = {}


class FixedRates(Rates):
    """Fixed speeds, so that no choice depends on the machine: slices are as long as they may be."""

    def __init__(self) -> None:
        super().__init__(load_bytes_per_s=5e8, slices=SliceCosts([(512, 0, 1e-4)]))

    def saw_load(self, n_bytes: int, seconds: float) -> None:
        return

    def saw_slice(self, n_tokens: int, context: int, seconds: float) -> None:
        return

    def declined_load(self) -> None:
        return

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) / self.prefill_tokens_per_s


class TrustingVerdicts(VerdictsFile):
    """Takes all rows for right in a batch, so that tokens fed by a trial are in nobody's count."""

    def get(self, key: str) -> Verdict:
        return Verdict(True, 0.0, 0.0, 0)


def small_tokenizer() -> Tokenizer:
    """Byte level over ASCII, with exactly the vocabulary size of the tiny models."""
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
    """Write the files that identify a model: weights, config and tokenizer."""
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

    def of(self, architecture: str, *, endless: bool = True, **changes: Any) -> Model:
        """A model with its own token counter. An endless one has no stop token."""
        path = self._path(architecture, **changes)
        tokenizer = load_tokenizer(path)
        if endless:
            tokenizer.eos_token_ids = set()
        counter = FedCounter(self.module(architecture, **changes))
        return Model(architecture, path, counter, tokenizer, {}, N_CONTEXT)

    def _write(self, architecture: str, **changes: Any) -> Path:
        directory = self._directory / "-".join([architecture, *map(str, changes.values())])
        return write_tiny(directory, architecture, self.module(architecture, **changes))


def memory(**bytes_of: int) -> MemoryConfig:
    """Small budgets, with changes."""
    usual = MemoryConfig(64 * MIB, 16 * MIB, 64 * MIB, 64 * MIB, 256 * MIB)
    return replace(usual, **bytes_of)


@contextmanager
def engine_on(
    model: Model,
    home: Path,
    *,
    budgets: Budgets | None = None,
    fixed_rates: bool = True,
    tries_padding: bool = False,
    engine_class: type[Engine] = Engine,
    environment: Mapping[str, str] = NO_VARIABLES,
    **options: Any,
) -> Iterator[Engine]:
    """An engine with its own store under `home`, both closed at the end; token count from 0."""
    settings = config.load({"KEEPWARM_HOME": str(home), **environment})
    options = {"memory": memory(), **options}
    budgets = budgets or Budgets(min_free_disk_bytes=0)
    with ExitStack() as stack:
        store = stack.enter_context(Store(budgets=budgets, settings=settings))
        chosen = EngineConfig(**options)
        engine = stack.enter_context(engine_class(model, store, chosen, settings=settings))
        if not tries_padding:
            engine._lanes.padding = TrustingVerdicts(home)
        lane = engine.lane_of()
        if fixed_rates:
            lane.restorer.rates = FixedRates()
            engine._scheduler.slice_sizer.max_slice = 128
        model.module.shapes.clear()
        yield engine
        engine.close()
        assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Nothing is held by a request that has ended: memory, a batch, the device, queued records."""
    scheduler, saver = engine._scheduler, engine.store.saver
    held: dict[str, Any] = {
        "jobs": scheduler.jobs,
        "prefilling": list(scheduler.prefilling),
        "rows": scheduler.rows,
        "reserved bytes": engine._admission.used_bytes,
        "leases": engine._admission._leases,
        "device": engine._device._is_taken,
    }
    if isinstance(saver, Writer):
        held |= {"readers": saver._restores, "queued": list(saver._order), "claims": saver._shares}
    assert not any(held.values()), {name: what for name, what in held.items() if what}


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Pause the engine's thread; requests submitted inside arrive together when it resumes."""
    go_on = threading.Event()
    waiting = engine.call(go_on.wait)
    try:
        yield
    finally:
        go_on.set()
    assert waiting.result()


def ask(prompt: Sequence[int], n: int = 6, /, **wishes: Any) -> Request:
    """A request for n tokens after these, with logprobs and other options."""
    names = Sampling.__dataclass_fields__
    sampling = {name: wishes.pop(name) for name in list(wishes) if name in names}
    chosen = Sampling(**{"max_tokens": n, "temperature": 0, "top_logprobs": 20, **sampling})
    return Request(prompt=list(prompt), sampling=chosen, **wishes)


def tokens_of(choice: Choice) -> list[int]:
    return [info.token for info in choice.tokens]


class Exam:
    """Answers to compare with a cold run of their model on the same tokens, all at once.

    The cold run is one pass from empty caches over prompt and answer. Every token must be its best
    one or a tie, and every requested logprob must be equal.
    """

    def __init__(
        self, module: Any, tolerance: float = TOLERANCE, without: int | None = None
    ) -> None:
        """`without` is a token that was forbidden."""
        self._module = module
        self._without = without
        self._tolerance = tolerance
        self._answers: list[tuple[list[int], int, Choice]] = []
        self.n_ties = 0

    def add(self, prompt: Sequence[int], choice: Choice) -> None:
        self._answers.append(([*prompt, *tokens_of(choice)], len(prompt), choice))

    def check(self) -> int:
        """Compare all added answers; return the number of tokens."""
        answers, self._answers = self._answers, []
        assert answers, "nothing to compare"
        longest = _not_begun([tokens for tokens, _, _ in answers])
        logprobs = np.array(self._logprobs(longest))
        for tokens, n_prompt, choice in answers:
            row = next(i for i, whole in enumerate(longest) if whole[: len(tokens)] == tokens)
            self._compare(logprobs[row, n_prompt - 1 :], choice)
        return sum(len(choice.tokens) for _, _, choice in answers)

    def _logprobs(self, sequences: Sequence[Sequence[int]]) -> mx.array:
        """Attention is causal, so padding at the end changes nothing."""
        longest = max(map(len, sequences))
        padded = mx.array([[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences])
        logits = self._module(padded, cache=make_prompt_cache(self._module))
        logprobs: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(logprobs)
        return logprobs

    def _compare(self, logprobs: Any, choice: Choice) -> None:
        assert choice.tokens, "an empty answer proves nothing"
        for step, info in enumerate(choice.tokens):
            allowed = logprobs[step].copy()
            if self._without is not None:
                allowed[self._without] = -np.inf
            close = allowed > allowed.max() - TIE
            assert close[info.token], f"step {step}: not what is likeliest"
            self.n_ties += int(close.sum() > 1)
            shown = [(info.token, info.logprob), *info.top] if info.logprob is not None else []
            for token, logprob in shown:
                apart = abs(logprob - logprobs[step][token])
                # Written so that NaN fails too.
                assert apart <= self._tolerance, f"step {step}: |Δlogprob| is {apart:.3g}"


def _not_begun(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Sequences that are no prefix of another: the last turn covers the earlier ones."""
    ordered = sorted(sequences)
    following = [*ordered[1:], []]
    return [one for one, after in zip(ordered, following, strict=True) if after[: len(one)] != one]

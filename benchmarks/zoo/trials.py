"""What one model type is put through: every way of being warm, compared with a cold run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.zoo.models import build
from keepwarm import config
from keepwarm.cache.policy import Policy
from keepwarm.cache.store import Budgets, Store
from keepwarm.device.memory import MemoryConfig
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.kv.kinds import leaves
from keepwarm.models.load import Model
from keepwarm.text.request import Choice, KVOptions, Request, Result, Sampling

MIB = 1 << 20
VOCABULARY = 128
END = "</s>"
N_CONTEXT = 4096
N_ANSWER = 4
SLICE = 64  # of a prompt that shows how far mlx-lm is from slice-invariant
EXACT = 1e-4  # |Δlogprob| in fp32
EXACT_IN_BATCH = 5e-4  # a fast BLAS adds in another order there
DRIFT = 10.0  # times what two slicings of plain mlx-lm differ by
QUANTISED = KVOptions(kv_bits=8, kv_group_size=32)
APART_8_BIT = 0.05  # a value at the edge of a step may round either way


@dataclass
class Findings:
    """What was seen of one type. Reuse is in tokens, of so many that the prompts share."""

    name: str
    caches: str = ""
    drift: float = 0.0  # of plain mlx-lm, between two slicings of one prompt
    apart: dict[str, float] = field(default_factory=dict)  # |Δlogprob| to a cold run, by trial
    reused: dict[str, tuple[int, int]] = field(default_factory=dict)
    batched: bool | None = None
    quantised: str = ""  # "yes", or why not
    failure: str = ""

    @property
    def limit(self) -> float:
        return max(EXACT, DRIFT * self.drift)

    @property
    def wrong(self) -> list[str]:
        limits = {
            "8 bit": max(APART_8_BIT, self.limit),
            "three at once": max(EXACT_IN_BATCH, self.limit),
        }
        return [t for t, apart in self.apart.items() if not apart <= limits.get(t, self.limit)]

    @property
    def verdict(self) -> str:
        if self.failure:
            return f"not run: {self.failure}"
        if self.wrong:
            return f"WRONG: {', '.join(self.wrong)}"
        return "exact" if self.drift <= EXACT else "as mlx-lm, which drifts"


def examine(name: str, folder: Path) -> Findings:
    """Put one type through all trials; a failure is part of the findings."""
    found = Findings(name)
    try:
        model = _load(name, folder / name / "model")
    except (Exception, SystemExit) as error:  # it lacks a package, or a GPU
        found.failure = _sentence(error)
        return found
    try:
        _examine(model, found, folder / name)
    except Exception as error:
        found.apart["failed"] = float("inf")
        found.quantised = found.quantised or _sentence(error)
    return found


def _examine(model: Model, found: Findings, home: Path) -> None:
    found.caches = ", ".join(
        sorted({type(leaf).__name__ for _, leaf in leaves(make_prompt_cache(model.module))})
    )
    prompt = tokens(300)
    found.drift = _drift(model.module, prompt)
    cold = _Cold(model.module)
    with _engine(model, home / "home") as engine:
        ask = _Asker(engine, found, cold)
        first = ask("cold", prompt, 0)
        ask("again", prompt, len(prompt) - 1)
        said = [*prompt, *first]
        ask("next turn", [*said, *tokens(40, 1)], len(said))
        ask("fork", [*prompt, *tokens(40, 2)], len(prompt))
        ask("rewind", [*prompt[:200], *tokens(40, 3)], 200)
        ask.at_once([tokens(n, n) for n in (130, 50, 91)])
        found.batched = engine.stats().shares_batches
    with _engine(model, home / "home") as engine:
        ask = _Asker(engine, found, cold)
        ask("restart", prompt, len(prompt) - 1)
        ask("restart, next turn", [*said, *tokens(40, 4)], len(said))
    _examine_quantised(model, found, home / "quantised", prompt)


def _examine_quantised(model: Model, found: Findings, home: Path, prompt: list[int]) -> None:
    try:
        with _engine(model, home, kv=QUANTISED) as engine:
            cold = _answer(engine, prompt, Policy.READ_WRITE)
            warm = _answer(engine, prompt, Policy.READ_WRITE)
    except BadInput:
        found.quantised = "refused"
        return
    found.apart["8 bit"] = _apart(cold.choices[0], warm.choices[0])
    found.quantised = "yes"


class _Asker:
    """Asks an engine and notes how far its answers are from cold ones."""

    def __init__(self, engine: Engine, found: Findings, cold: _Cold) -> None:
        self._engine, self._found, self._cold = engine, found, cold

    def __call__(self, trial: str, prompt: Sequence[int], n_known: int) -> list[int]:
        result = _answer(self._engine, prompt, Policy.READ_WRITE)
        if n_known:
            self._found.reused[trial] = (result.receipt.cached_tokens, n_known)
        return self._note(trial, prompt, result)

    def at_once(self, prompts: Sequence[Sequence[int]]) -> None:
        """Long answers: rows are tried before they share a batch, and then still decode in it."""
        running = [self._engine.submit(_request(p, 48)) for p in prompts]
        for prompt, answer in zip(prompts, running, strict=True):
            self._note("three at once", prompt, answer.result())

    def _note(self, trial: str, prompt: Sequence[int], result: Result) -> list[int]:
        choice = result.choices[0]
        apart = self._cold.apart(prompt, choice)
        self._found.apart[trial] = max(self._found.apart.get(trial, 0.0), apart)
        return [info.token for info in choice.tokens]


class _Cold:
    """Cold runs of plain mlx-lm: one pass from empty caches over prompt and answer."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def apart(self, prompt: Sequence[int], choice: Choice) -> float:
        """The largest |Δlogprob| of the tokens that the answer shows."""
        answer = [info.token for info in choice.tokens]
        logprobs = _logprobs(self._module, [*prompt, *answer])[len(prompt) - 1 :]
        shown = [
            (step, one.token, one.logprob)
            for step, info in enumerate(choice.tokens)
            for one in info.top
        ]
        steps, ids, got = (list(column) for column in zip(*shown, strict=True))
        expected = logprobs[mx.array(steps), mx.array(ids)]
        return _largest(mx.abs(expected - mx.array(got)))


def _apart(a: Choice, b: Choice) -> float:
    """The largest |Δlogprob| of two answers, up to the first token that differs."""
    worst = 0.0
    for one, other in zip(a.tokens, b.tokens, strict=True):
        known = {top.token: top.logprob for top in other.top}
        both = [abs(t.logprob - known[t.token]) for t in one.top[:5] if t.token in known]
        worst = max([worst, *both]) if both else float("inf")
        if one.token != other.token:
            break
    return worst


def _drift(module: Any, prompt: Sequence[int]) -> float:
    """How far plain mlx-lm is from itself when it is fed a prompt in other slices."""
    whole = _logprobs(module, prompt)
    best = mx.argsort(-whole, axis=-1)[:, :20]
    apart = [
        mx.abs(mx.take_along_axis(_sliced(module, prompt, ends) - whole, best, axis=-1))
        for ends in (range(SLICE, len(prompt), SLICE), range(len(prompt) - 20, len(prompt)))
    ]
    return max(_largest(x[1:]) for x in apart)


def _sliced(module: Any, prompt: Sequence[int], ends: Sequence[int]) -> mx.array:
    cache, parts = make_prompt_cache(module), []
    for start, end in pairwise([0, *ends, len(prompt)]):
        parts.append(_normalised(module(mx.array([prompt[start:end]]), cache=cache)[0]))
        mx.eval(parts[-1], [c.state for c in cache])
    return mx.concatenate(parts)


def _logprobs(module: Any, sequence: Sequence[int]) -> mx.array:
    return _normalised(module(mx.array([list(sequence)]), cache=make_prompt_cache(module))[0])


def _normalised(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _largest(x: mx.array) -> float:
    found: Any = x.max().item()
    return float(found) if found == found else float("inf")  # noqa: PLR0124 (NaN)


def tokens(n_tokens: int, seed: int = 0) -> list[int]:
    """A repeatable prompt."""
    made: Any = mx.random.randint(0, VOCABULARY, (n_tokens,), key=mx.random.key(seed)).tolist()
    return list(made)


def _request(prompt: Sequence[int], n_tokens: int, policy: Policy = Policy.READ_WRITE) -> Request:
    sampling = Sampling(max_tokens=n_tokens, top_logprobs=20)
    return Request(prompt=list(prompt), sampling=sampling, policy=policy)


def _answer(engine: Engine, prompt: Sequence[int], policy: Policy) -> Result:
    result = engine.submit(_request(prompt, N_ANSWER, policy)).result()
    engine.settle()
    return result


@contextmanager
def _engine(model: Model, home: Path, kv: KVOptions | None = None) -> Iterator[Engine]:
    settings = config.load({"KEEPWARM_HOME": str(home)})
    memory = MemoryConfig(64 * MIB, 16 * MIB, 64 * MIB, 64 * MIB, 1024 * MIB)
    chosen = EngineConfig(memory=memory, kv=kv or KVOptions())
    with (
        Store(budgets=Budgets(min_free_disk_bytes=0), settings=settings) as store,
        Engine(model, store, chosen, settings=settings) as engine,
    ):
        yield engine


def _load(name: str, path: Path) -> Model:
    """The model with a small tokenizer, and files that identify it."""
    module = build(name)
    mx.eval(module(mx.array([[1, 2]])))  # some need a GPU's kernels
    path.mkdir(parents=True)
    _tokenizer().save(str(path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "zoo": name}))
    mx.save_safetensors(str(path / "model.safetensors"), {"name": mx.array(list(name.encode()))})
    tokenizer = load_tokenizer(path)
    tokenizer.eos_token_ids = set()
    return Model(name, path, module, tokenizer, {}, N_CONTEXT)


def _tokenizer() -> Tokenizer:
    """Byte level over ASCII, one character a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ascii_bytes = [*map(chr, range(0x21, 0x7F)), "Ġ", "Ċ"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=ascii_bytes,
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


def _sentence(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, KeepwarmError) else f"{type(error).__name__}: {text}"

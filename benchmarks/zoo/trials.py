"""What one model type is put through: every way of being warm, compared with a cold run.

The first process asks a model that nobody asked before, the next one what is on disk by then.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.zoo.findings import BATCHED, QUANTISED, Findings, Padding
from benchmarks.zoo.models import build
from keepwarm import blas, config, kv
from keepwarm.cache.store import Budgets, Store
from keepwarm.device.memory import MemoryConfig
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.kv.kinds import leaves
from keepwarm.models.load import Model
from keepwarm.state_file import MACHINE, StateFile
from keepwarm.text.request import Choice, KVOptions, Request, Result, Sampling

MIB = 1 << 20
VOCABULARY = 128
END = "</s>"
N_CONTEXT = 4096
N_ANSWER = 4
SLICE = 64  # of a prompt that shows how far mlx-lm is from slice-invariant
N_BEST = 20  # tokens whose logprobs are compared
N_SINGLES = 40  # tokens of it that are fed one by one
HANGS_S = 900
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
EIGHT_BITS = KVOptions(kv_bits=8, kv_group_size=32)

Trial: TypeAlias = Callable[[Model, Findings, Path], None]


def first_process(name: str, dtype: str, folder: Path) -> Findings:
    """Everything that a new model is asked; a failure is part of the findings."""
    return _examine(Findings(name, dtype), folder, _ask_a_new_model)


def next_process(found: Findings, folder: Path) -> Findings:
    """What is on disk by now."""
    return _examine(found, folder, _ask_after_a_restart)


def _examine(found: Findings, folder: Path, trial: Trial) -> Findings:
    blas.start()
    home = folder / found.name / found.dtype
    try:
        model = _load(found, home / "model")
    except Exception as error:  # it lacks a package, or a GPU
        found.left_out = _sentence(error)
        return found
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    try:
        trial(model, found, home)
    except Exception as error:
        found.crash = _sentence(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return found


def _ask_a_new_model(model: Model, found: Findings, home: Path) -> None:
    module: _RowCounter = model.module
    kinds = {type(leaf).__name__ for _, leaf in leaves(make_prompt_cache(module))}
    found.caches = ", ".join(sorted(kinds))
    prompt = tokens(300)
    for seed in range(1, 5):
        whole = [*prompt, *tokens(N_SINGLES, seed)]
        found.drift = max(found.drift, drift_of(module, whole, len(prompt)))
    found.control = _control(module, prompt)
    with _engine(model, home / "home") as engine:
        ask = _Asker(engine, found, _Cold(module))
        said = [*prompt, *ask("cold", prompt, 0)]
        ask("again", prompt, len(prompt) - 1)
        ask("next turn", [*said, *tokens(40, 1)], len(said))
        ask("fork", [*prompt, *tokens(40, 2)], len(prompt))
        ask("rewind", [*prompt[:200], *tokens(40, 3)], 200)
        ask("rewind again", [*prompt[:200], *tokens(40, 5)], 200)
        ask.at_once([tokens(n, n) for n in (130, 50, 91)])
        found.batched, found.n_rows = engine.stats().shares_batches, module.n_rows
    found.padding = _padding(home / "home")
    found.alone = "" if found.batched else _why_alone(module, found.padding)
    (home / "said.json").write_text(json.dumps(said))
    with _quantised(model, found, home) as ask:
        ask(QUANTISED, prompt, 0)
        ask(f"{QUANTISED}, again", prompt, len(prompt) - 1)


def _ask_after_a_restart(model: Model, found: Findings, home: Path) -> None:
    prompt, said = tokens(300), json.loads((home / "said.json").read_text())
    # A model so small may be prefilled sooner than loaded; without known speeds it is loaded.
    (home / "home" / MACHINE).unlink(missing_ok=True)
    with _engine(model, home / "home") as engine:
        ask = _Asker(engine, found, _Cold(model.module))
        ask("new process", prompt, len(prompt) - 1)
        ask("new process, next turn", [*said, *tokens(40, 4)], len(said))
    if found.quantised != "refused":
        with _quantised(model, found, home) as ask:
            ask(f"{QUANTISED}, new process", prompt, len(prompt) - 1)


@contextmanager
def _quantised(model: Model, found: Findings, home: Path) -> Iterator[_Asker]:
    """Asks with 8 bits; types that refuse them say so at the first request."""

    def make() -> kv.Caches:
        return kv.make_caches(model.module, kv_bits=8, kv_group_size=32)

    found.quantised = "yes"
    try:
        with _engine(model, home / "quantised", EIGHT_BITS) as engine:
            yield _Asker(engine, found, _Cold(model.module, make))
    except BadInput:
        found.quantised = "refused"


def _padding(home: Path) -> Padding | None:
    """The verdict of the only trial there was; None if caches of this class share no batch."""
    found = StateFile(home / MACHINE, "padding", dict[str, Any]).read()
    return Padding(**next(iter(found.values()))["verdict"]) if found else None


def _why_alone(module: Any, padding: Padding | None) -> str:
    if padding is not None:
        return "padded rows differ"
    return "fails in a batch" if kv.can_batch(kv.make_caches(module)) else "class of cache"


class _Asker:
    """Asks an engine and notes how far its answers are from cold ones."""

    def __init__(self, engine: Engine, found: Findings, cold: _Cold) -> None:
        self._engine, self._found, self._cold = engine, found, cold

    def __call__(self, trial: str, prompt: Sequence[int], n_known: int) -> list[int]:
        result = self._engine.submit(_request(prompt, N_ANSWER)).result()
        self._engine.wait_until_saved()
        if n_known:
            self._found.reused[trial] = (result.receipt.cached_tokens, n_known)
        if n_known > result.receipt.cached_tokens and result.receipt.miss:
            self._found.missed[trial] = result.receipt.miss.reason
        return self._note(trial, prompt, result)

    def at_once(self, prompts: Sequence[Sequence[int]]) -> None:
        """Long answers: rows are tried before they share a batch, and then still decode in it."""
        running = [self._engine.submit(_request(p, 64)) for p in prompts]
        results = [answer.result() for answer in running]  # some models keep arrays of their calls
        for prompt, result in zip(prompts, results, strict=True):
            self._note(BATCHED, prompt, result)

    def _note(self, trial: str, prompt: Sequence[int], result: Result) -> list[int]:
        choice, found = result.choices[0], self._found
        apart = self._cold.apart(prompt, choice)
        found.apart[trial] = max(found.apart.get(trial, 0.0), apart)
        answer = [info.token for info in choice.tokens]
        if not trial.startswith(QUANTISED):
            drift = drift_of(self._cold.module, [*prompt, *answer], len(prompt))
            found.drift = max(found.drift, drift)
        return answer


class _Cold:
    """Cold runs of plain mlx-lm: one pass from empty caches over prompt and answer."""

    def __init__(self, module: Any, make: Callable[[], Any] | None = None) -> None:
        self.module, self._make = module, make or (lambda: make_prompt_cache(module))

    def apart(self, prompt: Sequence[int], choice: Choice) -> float:
        """The largest |Δlogprob| of the tokens that the answer shows."""
        answer = [info.token for info in choice.tokens]
        whole = mx.array([[*prompt, *answer]])
        logprobs = _normalised(self.module(whole, cache=self._make())[0])[len(prompt) - 1 :]
        shown = [
            (step, one.token, one.logprob)
            for step, info in enumerate(choice.tokens)
            for one in info.top
        ]
        steps, ids, got = (list(column) for column in zip(*shown, strict=True))
        expected = logprobs[mx.array(steps), mx.array(ids)]
        return _largest(mx.abs(expected - mx.array(got)))


def drift_of(module: Any, sequence: Sequence[int], n_prompt: int) -> float:
    """How far plain mlx-lm is from itself if tokens after a prompt are fed one by one."""
    whole = _logprobs(module, sequence)
    best = mx.argpartition(-whole, N_BEST, axis=-1)[:, :N_BEST]
    ends = (*range(SLICE, n_prompt - 1, SLICE), *range(n_prompt - 1, len(sequence)))
    apart = mx.take_along_axis(_sliced(module, sequence, ends) - whole, best, axis=-1)
    return _largest(mx.abs(apart[1:]))


def _control(module: Any, prompt: Sequence[int]) -> float:
    """How far the last token moves if one in the middle is another: what an error looks like."""
    middle = len(prompt) // 2
    other = [*prompt[:middle], (prompt[middle] + 1) % VOCABULARY, *prompt[middle + 1 :]]
    return _largest(mx.abs(_logprobs(module, prompt)[-1] - _logprobs(module, other)[-1]))


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


def _request(prompt: Sequence[int], n_tokens: int) -> Request:
    sampling = Sampling(max_tokens=n_tokens, temperature=0, top_logprobs=N_BEST)
    return Request(prompt=prompt, sampling=sampling, explain=True)


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


def _load(found: Findings, path: Path) -> Model:
    """The model with a small tokenizer, and files that identify it."""
    name = found.name
    module = build(name, DTYPES[found.dtype])
    mx.eval(module(mx.array([tokens(300)])))  # some need a GPU's kernels, or fail on one
    path.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "zoo": name}))
    mx.save_safetensors(str(path / "model.safetensors"), {"name": mx.array(list(name.encode()))})
    tokenizer = load_tokenizer(path)
    tokenizer.eos_token_ids = set()
    return Model(name, path, _RowCounter(module), tokenizer, {}, N_CONTEXT)


class _RowCounter:
    """A model that notes its widest batch."""

    def __init__(self, module: Any) -> None:
        self.module, self.n_rows = module, 0

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
        self.n_rows = max(self.n_rows, inputs.shape[0])
        return self.module(inputs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):  # before __init__ has run
            raise AttributeError(name)
        return getattr(self.module, name)


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

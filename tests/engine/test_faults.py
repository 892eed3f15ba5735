"""A fault at any stage ends at most one request; the others give the same answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from keepwarm.concurrency import DeviceLock
from keepwarm.engine.answer import Answer
from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import Lane
from keepwarm.engine.sampling import Sampler
from keepwarm.errors import KeepwarmError, Stopping
from keepwarm.models.load import Model
from keepwarm.prefix.policy import Policy
from keepwarm.text.prepare import PreparedRequest
from keepwarm.text.request import Delta, Request, Result, Started
from tests.kit.engines import Exam, Models, ask, engine_on, held, tokens_of
from tests.kit.runs import FedCounter, prompt_of

MARKER = 127  # the token that brings the fault
BATCHED = ("gemma3_text", "mamba")
STATES = ("mamba2", "falcon_h1")
MARKED, UNMARKED = {MARKER: 100.0}, {MARKER: -100.0}

each_batched = pytest.mark.parametrize("architecture", BATCHED)


class Faulty(FedCounter):
    """A model that fails on demand: `fault` sees the tokens and the caches it is fed."""

    fault: Callable[[mx.array, Any], None] | None = None

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out = super().__call__(inputs, *args, **kwargs)
        if self.fault is not None:
            self.fault(inputs, kwargs.get("cache"))
        return out


class FaultyTokenizer:
    """A tokenizer that cannot decode one token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, tokens: list[int], **options: Any) -> str:
        if MARKER in tokens:
            raise ValueError("no such character")
        text: str = self._tokenizer.decode(tokens, **options)
        return text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)


class StuckRule:
    """A grammar that breaks at the third token."""

    def __init__(self) -> None:
        self._n_masks = 0

    def copy(self) -> StuckRule:
        return StuckRule()

    @property
    def finished(self) -> bool:
        return False

    def mask(self) -> mx.array:
        self._n_masks += 1
        if self._n_masks == 3:
            raise RuntimeError("the rule is stuck")
        return mx.ones((128,), dtype=mx.bool_)

    def advance(self, token: int) -> None:
        return


class Keyless(Sampler):
    """Fails when it draws."""

    @property
    def key(self) -> Any:
        raise RuntimeError("no key")

    @key.setter
    def key(self, key: Any) -> None:
        return


@pytest.fixture
def model_of(models: Models) -> Callable[[str], Model]:
    def make(architecture: str) -> Model:
        model = models.of(architecture)
        return replace(model, module=Faulty(model.module.model))

    return make


def among_neighbours(engine: Engine, exam: Exam, request: Request | None, n_before: int = 2) -> str:
    """Submit a request while others decode; its error. Greedy neighbours must equal a cold run,
    and a sampled one the same request without a fault."""
    prompts = [unmarked(30 + 11 * i, seed=20 + i) for i in range(4)]
    drawn = ask(unmarked(25, seed=30), 20, temperature=1.0, seed=5, logit_bias=UNMARKED)
    calm = engine.submit(drawn).result()
    with held(engine):
        requests = [ask(prompt, 20, logit_bias=UNMARKED) for prompt in prompts]
        answers = [engine.submit(other) for other in requests[:n_before]]
        asked = None if request is None else engine.submit(request)
        answers += [engine.submit(other) for other in requests[n_before:]]
        again = engine.submit(drawn)
    error = "" if asked is None else error_of(asked)
    for prompt, answer in zip(prompts, answers, strict=True):
        exam.add(prompt, answer.result().choices[0])
    assert tokens_of(again.result().choices[0]) == tokens_of(calm.choices[0])
    return error


def error_of(answer: Answer) -> str:
    with pytest.raises(KeepwarmError) as error:
        answer.result()
    return str(error.value)


def works(engine: Engine, exam: Exam, prompt: list[int]) -> Result:
    result = engine.submit(ask(prompt, 4, logit_bias=UNMARKED)).result()
    exam.add(prompt, result.choices[0])
    return result


def unmarked(n_tokens: int, seed: int) -> list[int]:
    return [token % MARKER for token in prompt_of(n_tokens, seed)]


def marked(n_tokens: int) -> list[int]:
    return [*unmarked(n_tokens, seed=50), MARKER, 1]


# -- stage by stage -------------------------------------------------------------------------------


@each_batched
def test_prefill(model_of, models, tmp_path, architecture):
    """A prompt that breaks the model ends alone; the blocks before it are kept."""
    model, exam = model_of(architecture), Exam(models.module(architecture), without=MARKER)
    prompt = marked(330)
    with engine_on(model, tmp_path) as engine:

        def fault(inputs: mx.array, caches: Any) -> None:
            if inputs.shape[1] > 1 and MARKER in inputs[0].tolist():
                raise ValueError("a kernel failed")

        model.module.fault = fault
        assert "a kernel failed" in among_neighbours(engine, exam, ask(prompt, 4))
        model.module.fault = None
        known = works(engine, exam, prompt).receipt.cached_tokens
        assert known >= 256
    exam.check()


@pytest.mark.parametrize("architecture", STATES)
def test_prefill_of_states(model_of, models, tmp_path, architecture):
    """States are valid at one position only: those of the last block with which a slice ended are
    kept, not those after the slice that failed."""
    model, exam = model_of(architecture), Exam(models.module(architecture), without=MARKER)
    prompt = marked(330)
    with engine_on(model, tmp_path) as engine:

        def fault(inputs: mx.array, caches: Any) -> None:
            if MARKER in inputs[0].tolist():
                mx.eval([cache.state for cache in caches])
                raise ValueError("a kernel failed")

        model.module.fault = fault
        engine._scheduler.slice_sizer.max_slice = 32
        assert "a kernel failed" in error_of(engine.submit(ask(prompt, 4)))
        assert model.module.fed > 256 + 32
        model.module.fault = None
        assert works(engine, exam, prompt).receipt.cached_tokens == 256
        assert engine.stats().counters["failed_saves"] == 0
    exam.check()


@each_batched
def test_join(model_of, models, tmp_path, architecture):
    """Caches that do not fit the batch end their own request; the batch is rebuilt."""
    model, exam = model_of(architecture), Exam(models.module(architecture), without=MARKER)
    with engine_on(model, tmp_path) as engine:

        def fault(inputs: mx.array, caches: Any) -> None:
            if inputs.shape[0] == 1 and MARKER in inputs[0].tolist():
                spoil(caches[0])

        model.module.fault = fault
        request = ask([*unmarked(20, seed=50), MARKER], 4, policy=Policy.NO_STORE)
        assert "dtype" in among_neighbours(engine, exam, request)
        assert engine.stats().counters["rebuilt_batches"] == 1
        model.module.fault = None
        works(engine, exam, [*unmarked(20, seed=50), MARKER])
    exam.check()


def spoil(cache: Any) -> None:
    """Another dtype, as a broken restore might return."""
    if hasattr(cache, "keys"):
        cache.keys, cache.values = (x.astype(mx.float16) for x in (cache.keys, cache.values))
    else:
        cache.cache = [array.astype(mx.float16) for array in cache.cache]


@pytest.mark.parametrize(("architecture", "n_before"), [("gemma3_text", 1), ("mamba", 4)])
def test_a_step_that_always_fails_for_one(model_of, models, tmp_path, architecture, n_before):
    """A failed batch is rebuilt from blocks; in the end only the cause has failed."""
    model, exam = model_of(architecture), Exam(models.module(architecture), without=MARKER)
    with engine_on(model, tmp_path) as engine:

        def fault(inputs: mx.array, caches: Any) -> None:
            if inputs.shape[1] == 1 and MARKER in inputs[:, 0].tolist():
                raise RuntimeError("out of memory")

        model.module.fault = fault
        killer = ask(unmarked(20, seed=51), 6, logit_bias=MARKED)
        assert "out of memory" in among_neighbours(engine, exam, killer, n_before)
        model.module.fault = None
        counters = engine.stats().counters
        assert counters["failed"] == 1
        assert counters["rebuilt_batches"] >= 1
        works(engine, exam, unmarked(20, seed=51))
    exam.check()


@each_batched
def test_a_step_that_fails_once(model_of, models, tmp_path, architecture):
    """All sequences go on, greedy and sampled, with no token lost or changed."""
    model, exam = model_of(architecture), Exam(models.module(architecture), without=MARKER)
    seen = []
    with engine_on(model, tmp_path) as engine:

        def fault(inputs: mx.array, caches: Any) -> None:
            if len(inputs) > 1:
                seen.append(len(inputs))
                if len(seen) == 5:
                    raise RuntimeError("once")

        model.module.fault = fault
        among_neighbours(engine, exam, None)
        assert max(seen) >= 3
        assert engine.stats().counters["failed"] == 0
        assert engine.stats().counters["rebuilt_batches"] == 1
    exam.check()


def test_detokenise(model_of, models, tmp_path):
    model, exam = model_of("llama"), Exam(models.module("llama"), without=MARKER)
    model = replace(model, tokenizer=FaultyTokenizer(model.tokenizer))
    with engine_on(model, tmp_path) as engine:
        spoiled = ask(unmarked(20, seed=52), 6, logit_bias=MARKED)
        assert "no such character" in among_neighbours(engine, exam, spoiled)
        works(engine, exam, unmarked(20, seed=52))
    exam.check()


class WithRule(Engine):
    """Gives requests of agent `stuck` a rule that breaks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        prepare = self._preparation.prepare

        def with_rule(request: Request, *rest: Any) -> tuple[PreparedRequest, Lane]:
            prepared, lane = prepare(request, *rest)
            is_stuck = request.agent == "stuck"
            return replace(prepared, grammar=StuckRule()) if is_stuck else prepared, lane

        self._preparation.prepare = with_rule


@each_batched
def test_sampling_rules(model_of, models, tmp_path, architecture):
    """The rules of one row fail after two tokens. What is kept of it is right: the token that was
    fed afterwards is in its cache, so it must be in `row.tokens`."""
    model, exam = model_of(architecture), Exam(models.module(architecture), without=MARKER)
    prompt = unmarked(20, seed=53)
    with engine_on(model, tmp_path, engine_class=WithRule) as engine:
        request = ask(prompt, 6, agent="stuck")
        assert "the rule is stuck" in among_neighbours(engine, exam, request)
        answer = tokens_of(works(engine, exam, prompt).choices[0])
        for n in range(1, 4):
            works(engine, exam, [*prompt, *answer[:n], 3, 4, 5])
        assert engine.stats().counters["failed_saves"] == 0
    exam.check()


def test_draws(model_of, tmp_path):
    """A failed draw fails the whole batch; the others draw the same tokens again."""
    drawn = ask(unmarked(25, seed=30), 200, temperature=1.0, seed=5)
    broken = ask(unmarked(30, seed=31), 200, temperature=1.0)
    with engine_on(model_of("llama"), tmp_path) as engine:
        calm = engine.submit(drawn).result()
        with held(engine):
            again, faulty = engine.submit(drawn), engine.submit(broken)
        assert any(isinstance(event, Delta) for event in faulty)

        def break_it() -> None:
            others, last = engine._scheduler.rows
            assert others.job.answer is again
            last.sampler = Keyless(broken.sampling, 128)

        engine.call(break_it).result()
        assert "no key" in error_of(faulty)
        assert tokens_of(again.result().choices[0]) == tokens_of(calm.choices[0])
        assert engine.stats().counters["rebuilt_batches"] > 0


# -- what the cache does wrong costs no answer ----------------------------------------------------


class BrokenWriter:
    """A saver that saves nothing."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def put(self, *record: Any) -> None:
        raise OSError("no space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@pytest.mark.parametrize("policy", [Policy.READ_WRITE, Policy.DURABLE])
def test_capture(model_of, models, tmp_path, policy):
    """A failed save is counted, and no request hangs."""
    model, exam = model_of("falcon_h1"), Exam(models.module("falcon_h1"), without=MARKER)
    prompt = unmarked(300, seed=55)
    with engine_on(model, tmp_path) as engine:
        restorer = engine.lane_of().restorer
        writer, restorer.writer = restorer.writer, BrokenWriter(restorer.writer)
        result = engine.submit(ask(prompt, 4, policy=policy, logit_bias=UNMARKED)).result()
        exam.add(prompt, result.choices[0])
        assert engine.stats().counters["failed_saves"] > 0
        restorer.writer = writer
        works(engine, exam, prompt)
    exam.check()


# -- the loop itself ------------------------------------------------------------------------------


def test_the_loop_outlives_a_failing_scheduler(model_of, models, tmp_path):
    """All running requests end with an error; the next one is served."""
    model, exam = model_of("llama"), Exam(models.module("llama"), without=MARKER)
    with engine_on(model, tmp_path) as engine:
        running = engine.submit(ask(prompt_of(20), 2000))
        assert isinstance(next(running), Started)

        def break_it() -> None:
            engine._scheduler.prefilling = None

        engine.call(break_it).result()
        assert "other requests continue" in error_of(running)
        assert engine.alive
        works(engine, exam, prompt_of(20))
    exam.check()


def test_a_command_that_fails_raises_in_its_caller(model_of, tmp_path):
    with engine_on(model_of("llama"), tmp_path) as engine:
        with pytest.raises(ZeroDivisionError):
            engine.call(lambda: 1 // 0).result()
        assert engine.alive
        assert threading.active_count() > 1


def test_a_device_that_is_lost_ends_all_requests_and_gets_none(model_of, tmp_path, caplog):
    """As by an illegal access to memory on CUDA, after which every operation fails."""

    def fault(inputs: mx.array, caches: Any) -> None:
        if MARKER in inputs[0].tolist():
            raise RuntimeError("an illegal memory access was encountered")

    def compute() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    model, lost = model_of("llama"), pytest.raises(Stopping, match="illegal memory access")
    model.module.fault = fault
    shared = partial(Engine, device=DeviceLock(compute))
    with engine_on(model, tmp_path, engine_class=shared) as engine:
        running = engine.submit(ask(prompt_of(20), 2000, logit_bias=UNMARKED))
        assert isinstance(next(running), Started)
        with lost:
            engine.submit(ask(marked(20), 4)).result()
        with lost:
            running.result()
        with lost:
            engine.submit(ask(prompt_of(20), 4))
        assert not engine.alive
    assert [record.levelname for record in caplog.records].count("CRITICAL") == 1

"""The exactness kit sees what is wrong, with mlx-lm's own caches, before it judges ours."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.kit.compare import TIE, assert_differs, assert_same, gaps
from tests.kit.models import ARCHITECTURES, LAYER_KINDS, tiny
from tests.kit.runs import (
    STEP,
    FedCounter,
    Job,
    Run,
    batched,
    cold,
    continue_from,
    prefill,
    prompt_of,
)

N = 8
PROMPT = prompt_of(90, seed=1)  # longer than two windows or chunks of 32
OTHER = prompt_of(90, seed=2)
CUT = 64


def each(names, always):
    """All this is about the kit and mlx-lm alone, which seldom change."""
    marks = {name: [pytest.mark.soak] * (name not in always) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n]) for n in names])


every_kind = each(LAYER_KINDS, always=("llama", "gemma3_text", "falcon_h1"))
every_architecture = each(ARCHITECTURES, always=LAYER_KINDS)


@pytest.fixture(scope="module")
def alone(tiny_model):
    """The cold run of a model over a prompt, computed once for all that is compared with it."""

    @cache
    def run(name, prompt, step):
        return cold(tiny_model(name), list(prompt), N, step=step)

    return lambda name, prompt, step=STEP: run(name, tuple(prompt), step)


@every_architecture
def test_greedy_output_is_varied_and_depends_on_the_prompt(name, tiny_model):
    """A model that repeats one token would agree with anything."""
    runs = [cold(tiny_model(name), p, 24) for p in (PROMPT, OTHER)]
    assert all(len(set(run.tokens)) >= 8 for run in runs)
    assert_differs(*runs)
    assert runs[0].tokens != runs[1].tokens


@every_architecture
def test_the_first_and_the_last_token_of_a_prompt_matter(name, tiny_model):
    """Window models see the first token no more directly, but their global layers do."""
    reference = cold(tiny_model(name), PROMPT[:40], N)
    other_last = [*PROMPT[:39], (PROMPT[39] + 1) % 128]
    other_first = [(PROMPT[0] + 1) % 128, *PROMPT[1:40]]
    assert_differs(reference, cold(tiny_model(name), other_last, N))
    with pytest.raises(AssertionError):
        assert_same(reference, cold(tiny_model(name), other_first, N))


@every_architecture
def test_models_are_fp32_untied_equal_at_every_build_and_evaluated(name):
    """A lazy array belongs to the thread that made it; another thread cannot evaluate it."""
    models = [tiny(name) for _ in range(2)]
    a, b = (dict(tree_flatten(model.parameters())) for model in models)
    assert {p.dtype for p in a.values()} == {mx.float32}
    assert any(path.endswith("lm_head.weight") for path in a)
    assert a.keys() == b.keys()
    assert all(mx.array_equal(a[path], b[path]) for path in a)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(cold, models[0], PROMPT, 2).result()
    assert_same(cold(models[0], PROMPT, 2), run, bitwise=True)


@every_kind
@pytest.mark.parametrize(
    "held",
    [OTHER[:CUT], PROMPT[: CUT - 1], PROMPT[1 : CUT + 1], [*PROMPT[: CUT - 1], OTHER[CUT - 1]]],
    ids=["wrong cache", "one token short", "shifted by one", "last token wrong"],
)
def test_a_wrong_cache_is_seen(name, held, tiny_model, alone):
    """Controls: a comparison that cannot fail proves nothing."""
    model = tiny_model(name)
    cache = prefill(model, make_prompt_cache(model), held)
    warm = continue_from(model, cache, PROMPT[CUT:], N)
    with pytest.raises(AssertionError, match="Δlogprob"):
        assert_same(alone(name, PROMPT), warm)


def _prefilled(model, prompt, **how):
    """A row that was prefilled alone and joins the batch with its last token."""
    cache = prefill(model, make_prompt_cache(model), prompt[:-1], step=16)
    return Job(prompt[-1:], N, prompt[:-1], cache, **how)


@every_kind
def test_a_wrong_cache_is_seen_in_a_batch(name, tiny_model, alone):
    """Control: the neighbour's cache, injected under this prompt's name."""
    model = tiny_model(name)
    wrong = prefill(model, make_prompt_cache(model), OTHER[:CUT])
    job = Job(PROMPT[CUT:], N, PROMPT[:CUT], wrong)
    run, _ = batched(model, [job, _prefilled(model, OTHER)])
    assert_differs(alone(name, PROMPT), run)


def test_fed_counter_counts_what_one_sequence_was_fed(tiny_model):
    """Prefilled tokens are proven where the model is called."""
    model = FedCounter(tiny_model("llama"))
    cold(model, PROMPT, 3, step=32)
    assert model.shapes == [(1, 32), (1, 32), (1, 25)] + [(1, 1)] * 4
    assert (model.fed, model.prefilled, model.decoded) == (93, 89, 4)


def _run(*rows: list[float]) -> Run:
    logprobs = mx.array(rows)
    return Run(mx.argmax(logprobs, axis=-1).tolist(), logprobs, [])


def test_a_tie_ends_the_comparison_and_is_reported():
    """Two best tokens closer than 1e-3."""
    reference = _run([0.0, 1.0], [0.5, 0.5 + TIE / 20], [1.0, 0.0])
    other = _run([0.0, 1.0], [0.5 + TIE / 20, 0.5], [0.0, 1.0])
    assert gaps(reference)[1] < TIE
    agreement = assert_same(reference, other)
    assert (agreement.n_steps, agreement.tie) == (1, 1)
    with pytest.raises(AssertionError, match="step 1 of 3"):
        assert_same(reference, other, bitwise=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_run([0.0, 1.0], [0.0, 1.0 + 2e-4]), "step 1 of 2"),
        (_run([0.0, 1.0], [0.0, float("nan")]), "step 1 of 2"),
        (_run([0.0, 1.0]), "lengths differ"),
        (_run([0.0, 1.0], [0.0, 1.0])._replace(tokens=[1, 0]), "tokens differ"),
        (_run([0.0, 1.0], [0.0, 1.0])._replace(logprobs=mx.zeros((2, 2), mx.float16)), "fp32"),
    ],
)
def test_what_is_not_the_same_fails_with_its_reason(other, message):
    """More than 1e-4 apart, or other tokens."""
    with pytest.raises(AssertionError, match=message):
        assert_same(_run([0.0, 1.0], [0.0, 1.0]), other)


def test_bitwise_allows_no_last_bit():
    reference, other = _run([0.0, 1.0]), _run([0.0, 1.0 + 1e-6])
    assert assert_same(reference, other).max_difference > 0
    with pytest.raises(AssertionError, match="allowed 0"):
        assert_same(reference, other, bitwise=True)


def test_a_control_that_agrees_fails():
    with pytest.raises(AssertionError, match="a control must differ"):
        assert_differs(_run([0.0, 1.0]), _run([0.0, 1.0]))


def test_no_test_moves_the_clock_of_the_whole_process():
    """The event loop of another test's server would sleep until its machine has been up so long."""
    moved = re.compile(r"setattr\((\w+\.)*time, ")
    found = [path for path in Path(__file__).parent.rglob("*.py") if moved.search(path.read_text())]
    assert found == []

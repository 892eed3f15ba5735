"""The exactness kit proves itself with mlx-lm's own caches before it judges ours."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ConcatenateKVCache, make_prompt_cache

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

every_kind = pytest.mark.parametrize("name", LAYER_KINDS)
# These are about the kit and mlx-lm alone, which seldom change.
every_architecture = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.soak] * (n not in LAYER_KINDS)) for n in ARCHITECTURES],
)


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
def test_continuing_from_a_copied_cache_is_bit_equal_on_equal_slices(name, tiny_model, alone):
    """And the donor of a copy is untouched, so it serves twice."""
    model = tiny_model(name)
    reference = alone(name, PROMPT, 16)
    donor = prefill(model, make_prompt_cache(model), PROMPT[:CUT], step=16)
    for _ in range(2):
        warm = continue_from(model, copy.deepcopy(donor), PROMPT[CUT:], N, step=16)
        assert_same(reference, warm, bitwise=True)


@every_kind
@pytest.mark.parametrize("cut", [1, 50])
def test_continuing_on_other_slices_is_the_same_within_tolerance(name, cut, tiny_model, alone):
    """Slices are no part of the answer."""
    model = tiny_model(name)
    cache = prefill(model, make_prompt_cache(model), PROMPT[:cut], step=20)
    warm = continue_from(model, cache, PROMPT[cut:], N, step=7)
    assert assert_same(alone(name, PROMPT), warm).n_steps > 0


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


def test_concatenate_cache_serves_a_whole_model(tiny_model):
    """No model puts one into its prompt cache, so llama is given some."""
    model = tiny_model("llama")
    cache = [ConcatenateKVCache() for _ in model.layers]
    assert_same(cold(model, PROMPT, N), continue_from(model, cache, PROMPT, N), bitwise=True)


def _prefilled(model, prompt, **how):
    """A row that was prefilled alone and joins the batch with its last token."""
    cache = prefill(model, make_prompt_cache(model), prompt[:-1], step=16)
    return Job(prompt[-1:], N, prompt[:-1], cache, **how)


@every_kind
def test_rows_prefilled_alone_keep_their_cold_runs_in_a_batch(name, tiny_model, alone):
    """Left-padded, injected and late-joined rows, each as if it were alone."""
    model = tiny_model(name)
    prompts = [PROMPT, PROMPT[:20], OTHER, OTHER[:50]]
    jobs = [_prefilled(model, p, joins_at=4 * (p is prompts[3])) for p in prompts]
    for prompt, run in zip(prompts, batched(model, jobs), strict=True):
        assert_same(alone(name, prompt, 16), run)


@every_kind
def test_rows_prefilled_together_get_their_cold_runs(name, tiny_model, alone):
    """BatchGenerator pads the prompts on the right, and rolls the padding away."""
    model = tiny_model(name)
    cache = prefill(model, make_prompt_cache(model), OTHER[:CUT])
    injected = Job(OTHER[CUT:], N, OTHER[:CUT], cache)
    jobs = [Job(PROMPT, N), Job(PROMPT[:20], N), injected, Job(OTHER[:50], N, joins_at=4)]
    runs = batched(model, jobs, step=16)
    for run, prompt in zip(runs, [PROMPT, PROMPT[:20], OTHER, OTHER[:50]], strict=True):
        assert_same(alone(name, prompt), run)


@every_kind
def test_a_cache_taken_out_of_a_batch_goes_on_alone(name, tiny_model):
    """The final cache holds the prompt and every token that was answered."""
    model = tiny_model(name)
    first, _ = batched(model, [_prefilled(model, PROMPT[:60]), _prefilled(model, OTHER)])
    alone = continue_from(model, first.cache, PROMPT[60:], N)
    assert_same(cold(model, [*PROMPT[:60], *first.tokens, *PROMPT[60:]], N), alone)


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


def test_fed_counter_counts_a_batch_with_its_padding(tiny_model):
    """An injected cache's tokens are not fed again; padding is fed and counted."""
    plain = tiny_model("llama")
    cache = prefill(plain, make_prompt_cache(plain), PROMPT[:CUT])
    model = FedCounter(plain)
    batched(model, [Job(PROMPT[CUT:], 1, PROMPT[:CUT], cache)])
    assert model.shapes == [(1, len(PROMPT) - CUT - 1), (1, 1), (1, 1)]
    model = FedCounter(plain)
    batched(model, [Job(PROMPT[:30], 1), Job(PROMPT[:10], 1)])
    assert model.shapes == [(2, 29), (2, 1), (2, 1)]
    assert model.prefilled == 58


def test_fed_counter_is_the_model_in_every_other_way(tiny_model):
    gemma, qwen = FedCounter(tiny_model("gemma3_text")), FedCounter(tiny_model("qwen3"))
    assert [type(c) for c in make_prompt_cache(gemma)] == [
        type(c) for c in make_prompt_cache(gemma.model)
    ]
    assert not hasattr(qwen, "make_cache")
    assert len(qwen.layers) == len(qwen.model.layers)
    assert copy.copy(qwen).layers is qwen.layers
    assert_same(cold(gemma.model, PROMPT, 4), cold(gemma, PROMPT, 4), bitwise=True)


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

"""One sequence: equal to a cold run whatever was warm, and fed no token twice."""

from dataclasses import replace
from itertools import count

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_lm.tokenizer_utils import load as load_tokenizer

from keepwarm.engine.generate import LiveCache, generate
from keepwarm.engine.model import Model
from keepwarm.engine.sampling import make_sampler
from keepwarm.errors import BadInput
from keepwarm.prefix.blocks import BLOCK_TOKENS
from tests.kit.checkpoints import write_checkpoint
from tests.kit.models import WINDOW
from tests.kit.runs import FedCounter, cold, prompt_of

ARCHITECTURES = ["llama", "gemma3_text", "mamba2", "qwen3_next"]
LONG = 2 * BLOCK_TOKENS + 70


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model_of(checkpoint, tiny_model):
    """A function: a tiny model of this architecture that counts what it is fed and never stops."""

    def make(architecture: str, n_context: int = 4096) -> Model:
        tokenizer = load_tokenizer(checkpoint)
        tokenizer.eos_token_ids = set()
        module = FedCounter(tiny_model(architecture))
        return Model(architecture, checkpoint, module, tokenizer, {}, n_context)

    return make


@pytest.fixture
def model(model_of):
    return model_of("llama")


def tokens_of(model, prompt, **options):
    return [step.token for step in generate(model, prompt, **options)]


# -- equal to a cold run --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tokens_are_those_of_a_plain_loop(model_of, tiny_model, architecture):
    prompt = prompt_of(LONG)
    plain = cold(tiny_model(architecture), prompt, 20, step=BLOCK_TOKENS)
    assert tokens_of(model_of(architecture), prompt, max_tokens=20) == plain.tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_turn_that_extends_the_last_one_is_fed_only_what_is_new(model_of, architecture):
    """Every kind of cache is extended, the untrimmable ones too: the ledger is a true prefix."""
    model = model_of(architecture)
    cache = LiveCache(model)
    first = prompt_of(300)
    answer = tokens_of(model, first, cache=cache, max_tokens=10)
    second = [*first, *answer, *prompt_of(40, seed=1)]
    fed = model.module.fed
    warm = generate(model, second, cache=cache, max_tokens=10)
    tokens = [step.token for step in warm]
    assert tokens == tokens_of(model_of(architecture), second, max_tokens=10)
    assert model.module.fed - fed == len(second) - (300 + 9) + 9  # new prompt, then 9 of the answer
    assert (warm.usage.cached_tokens, warm.usage.prefilled_tokens) == (309, 41)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama4"])
@pytest.mark.parametrize("common", [0, 7, 150])
def test_a_turn_that_parts_from_the_last_one_is_never_wrong(model_of, architecture, common):
    """Chunked caches (llama4) say that they can be trimmed, and are then wrong."""
    model = model_of(architecture)
    cache = LiveCache(model)
    first = prompt_of(200)
    tokens_of(model, first, cache=cache, max_tokens=5)
    second = [*first[:common], *((t + 1) % 128 for t in first[common:])]
    warm = generate(model, second, cache=cache, max_tokens=10)
    assert [s.token for s in warm] == tokens_of(model_of(architecture), second, max_tokens=10)
    trimmable = architecture == "llama"
    assert warm.usage.cached_tokens == (common if trimmable else 0)


def test_a_window_that_has_not_slid_is_trimmed(model_of):
    """S3-37: what can be trimmed is; a window that has slid starts over (the test above)."""
    model = model_of("gemma3_text")
    cache = LiveCache(model)
    first = prompt_of(WINDOW - 10)
    tokens_of(model, first, cache=cache, max_tokens=3)
    second = [*first[:12], *prompt_of(20, seed=5)]
    warm = generate(model, second, cache=cache, max_tokens=10)
    assert [s.token for s in warm] == tokens_of(model_of("gemma3_text"), second, max_tokens=10)
    assert warm.usage.cached_tokens == 12
    assert {RotatingKVCache, KVCache} == {type(layer) for layer in cache.layers}


def test_a_repeat_is_fed_one_token(model):
    cache, prompt = LiveCache(model), prompt_of(300)
    first = tokens_of(model, prompt, cache=cache, max_tokens=5)
    again = generate(model, prompt, cache=cache, max_tokens=5)
    assert [step.token for step in again] == first
    assert (again.usage.cached_tokens, again.usage.prefilled_tokens) == (299, 1)


def test_a_wrong_cache_would_be_seen(model, model_of):
    """The control: with rows of other tokens under the right ledger the answer differs."""
    prompt = prompt_of(100)
    cache = LiveCache(model)
    cache.feed(prompt_of(99, seed=9))
    cache.tokens = prompt[:99]
    assert tokens_of(model, prompt, cache=cache, max_tokens=10) != tokens_of(
        model_of("llama"), prompt, max_tokens=10
    )


# -- the ledger and the counts --------------------------------------------------------------------


def test_the_cache_holds_the_prompt_and_the_answer_but_its_last_token(model):
    cache, prompt = LiveCache(model), prompt_of(30)
    answer = tokens_of(model, prompt, cache=cache, max_tokens=6)
    assert cache.tokens == prompt + answer[:-1]
    assert {layer.offset for layer in cache.layers} == {len(cache.tokens)}


def test_an_abandoned_answer_leaves_a_true_ledger(model):
    cache, prompt = LiveCache(model), prompt_of(30)
    steps = generate(model, prompt, cache=cache, max_tokens=50)
    answer = [next(steps).token for _ in range(4)]
    assert cache.tokens == prompt + answer[:-1]
    assert {layer.offset for layer in cache.layers} == {len(cache.tokens)}


@pytest.mark.parametrize("n_tokens", [1, 2, 256, 257, 258, LONG])
def test_usage_counts_what_the_model_was_fed(model, n_tokens):
    generation = generate(model, prompt_of(n_tokens), max_tokens=4)
    list(generation)
    usage = generation.usage
    assert usage.prompt_tokens == usage.prefilled_tokens == n_tokens
    assert (usage.cached_tokens, usage.completion_tokens) == (0, 4)
    assert model.module.fed == n_tokens + 3
    assert max(length for _, length in model.module.shapes) <= BLOCK_TOKENS
    assert usage.ttft_ms > 0
    assert usage.tokens_per_second > 0


def test_one_token_has_no_rate(model):
    generation = generate(model, prompt_of(5), max_tokens=1)
    assert generation.usage.ttft_ms == 0  # nothing has run
    list(generation)
    assert generation.usage.tokens_per_second == 0


def test_quantised_keys_and_values_are_not_exact(model):
    cache = LiveCache(model)
    assert generate(model, [1], cache=cache).usage.exact
    cache.layers = [QuantizedKVCache(group_size=64, bits=8) for _ in cache.layers]
    generation = generate(model, prompt_of(20), cache=cache, max_tokens=3)
    assert len(list(generation)) == 3
    assert not generation.usage.exact


# -- where it ends --------------------------------------------------------------------------------


def test_a_stop_token_ends_the_answer_and_is_not_in_its_text(model):
    prompt = prompt_of(30)
    free = list(generate(model, prompt, max_tokens=12))
    stop = free[6].token
    n_before = [step.token for step in free].index(stop)
    model.tokenizer.eos_token_ids = {stop}
    generation = generate(model, prompt, max_tokens=12)
    steps = list(generation)
    assert [step.token for step in steps] == [step.token for step in free[: n_before + 1]]
    assert [step.finish_reason for step in steps] == [None] * n_before + ["stop"]
    kept = [step.token for step in steps[:-1]]
    assert "".join(step.text for step in steps) == model.tokenizer.decode(kept)
    assert generation.usage.completion_tokens == n_before + 1
    assert stop not in generation.cache.tokens[len(prompt) :]


def test_max_tokens_ends_the_answer_with_all_of_its_text(model):
    steps = list(generate(model, prompt_of(30), max_tokens=7))
    assert [step.finish_reason for step in steps] == [None] * 6 + ["length"]
    assert "".join(s.text for s in steps) == model.tokenizer.decode([s.token for s in steps])


def test_the_context_ends_the_answer(model_of):
    model = model_of("llama", n_context=40)
    steps = list(generate(model, prompt_of(30), max_tokens=100))
    assert len(steps) == 10
    assert steps[-1].finish_reason == "length"
    assert len(list(generate(model, prompt_of(39), max_tokens=100))) == 1


def test_a_prefill_can_be_stopped_between_slices_and_goes_on_where_it_stood(model):
    cache, prompt, asked = LiveCache(model), prompt_of(LONG), count()
    stopped = generate(model, prompt, cache=cache, should_stop=lambda: next(asked) >= 2)
    assert list(stopped) == []
    assert cache.tokens == prompt[: 2 * BLOCK_TOKENS]
    assert stopped.usage.prefilled_tokens == 2 * BLOCK_TOKENS == model.module.fed
    resumed = generate(model, prompt, cache=cache, max_tokens=5)
    assert [s.token for s in resumed] == tokens_of(model, prompt, max_tokens=5)
    assert (resumed.usage.cached_tokens, resumed.usage.prefilled_tokens) == (512, 70)


def test_an_answer_can_be_stopped_between_tokens(model):
    seen = []
    for step in generate(model, prompt_of(20), max_tokens=50, should_stop=lambda: len(seen) == 3):
        seen.append(step)
    assert [step.finish_reason for step in seen] == [None] * 3


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_inside_the_model_empties_the_cache(model, failure):
    """Some layers have the tokens and some have not: nothing of it may be used again."""
    cache, prompt = LiveCache(model), prompt_of(100)
    tokens_of(model, prompt[:50], cache=cache, max_tokens=1)

    class Failing(FedCounter):
        def __call__(self, *args, **kwargs):
            super().__call__(*args, **kwargs)
            raise failure

    broken = replace(model, module=Failing(model.module))
    cache_of_broken = LiveCache(broken)
    cache_of_broken.layers, cache_of_broken.tokens = cache.layers, cache.tokens
    with pytest.raises(failure):
        list(generate(broken, prompt, cache=cache_of_broken))
    assert cache_of_broken.tokens == []
    assert all(layer.offset == 0 for layer in cache_of_broken.layers)


def test_state_layers_start_over_rather_than_trim(model_of):
    model = model_of("mamba2")
    cache = LiveCache(model)
    tokens_of(model, prompt_of(20), cache=cache, max_tokens=3)
    assert cache.keep(prompt_of(10)) == 0
    assert all(isinstance(layer, ArraysCache) and layer.empty() for layer in cache.layers)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([], {}, "prompt is empty"),
        (prompt_of(40), {}, "40 tokens long and llama reads at most 39"),
        ([1], {"max_tokens": 0}, "max-tokens is 0"),
        ([1], {"max_tokens": -1}, "max-tokens is -1"),
        ([1], {"temperature": -0.1}, "temperature is -0.1"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": float("inf")}, "temperature is inf"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model_of, prompt, options, says):
    model = model_of("llama", n_context=40)
    with pytest.raises(BadInput, match=says):
        generate(model, prompt, **options)
    assert model.module.fed == 0


# -- sampling -------------------------------------------------------------------------------------


def test_a_seed_makes_the_draws_repeatable(model):
    def draw(seed):
        return tokens_of(model, prompt_of(20), max_tokens=20, temperature=1.0, seed=seed)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(None) != draw(None)


def test_the_seed_is_the_request_own_and_not_the_process(model):
    first = tokens_of(model, prompt_of(20), max_tokens=10, temperature=1.0, seed=3)
    mx.random.seed(99)
    mx.random.normal((10,))
    assert tokens_of(model, prompt_of(20), max_tokens=10, temperature=1.0, seed=3) == first


def test_draws_follow_the_temperature():
    logits = mx.log(mx.array([[0.1, 0.9]]))

    def share(temperature):
        sample = make_sampler(temperature, seed=0)
        return sum(sample(logits).item() for _ in range(2000)) / 2000

    assert share(0) == 1
    assert share(1) == pytest.approx(0.9, abs=0.03)
    assert share(2) == pytest.approx(3 / 4, abs=0.03)  # sqrt(0.9) : sqrt(0.1) is 3 : 1


def test_draws_are_right_in_half_precision():
    logits = mx.log(mx.array([[0.1, 0.9]])).astype(mx.float16)
    assert make_sampler(1e-6, seed=0)(logits).item() == 1

"""Settings of the cache: a bound on its size, and bits."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from keepwarm.errors import BadInput
from keepwarm.kv.batch import can_batch
from keepwarm.kv.kinds import leaves
from keepwarm.kv.layout import probe
from keepwarm.kv.make import BITS, make_caches
from keepwarm.kv.quant import QuantKVCache
from tests.kit.compare import assert_differs, assert_same
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import Job, batched, cold, continue_from, prefill, prompt_of
from tests.kv.test_batch_models import held_by, prefilled_rows

N = 5
BOUND = 24
PROMPTS = [prompt_of(70, seed=1), prompt_of(20, seed=2), prompt_of(41, seed=3)]
# Without make_cache, and a window model with some global layers.
BOUNDED = ["qwen3", "gemma3_text"]


def bounded(model):
    return make_caches(model, max_kv_size=BOUND)


def alone(model, fresh, prompt, n=N, step=16):
    return continue_from(model, fresh(model), prompt, n, step=step)


def types_of(caches):
    return [type(leaf) for _, leaf in leaves(caches)]


@pytest.mark.parametrize("name", CACHE_KINDS)
@pytest.mark.parametrize(
    ("setting", "cls"),
    [({"max_kv_size": 9}, RotatingKVCache), ({"kv_bits": 4}, QuantKVCache), ({}, KVCache)],
)
def test_settings_reach_the_layers_that_keep_every_token(name, setting, cls, tiny_model):
    """Also inside composites; mlx-lm ignores max_kv_size where `make_cache` is."""
    model = tiny_model(name)
    expected = [cls if t is KVCache else t for t in types_of(make_prompt_cache(model))]
    caches = make_caches(model, **setting)
    assert types_of(caches) == expected
    for (_, leaf), (_, before) in zip(
        leaves(caches), leaves(make_prompt_cache(model)), strict=True
    ):
        if type(before) is KVCache and cls is RotatingKVCache:
            assert (leaf.max_size, leaf.keep) == (9, 0)
        elif type(leaf) is QuantKVCache:
            assert (leaf.bits, leaf.group_size) == (4, 64)
        elif isinstance(leaf, RotatingKVCache):
            assert leaf.max_size == before.max_size


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_means_the_same_alone_and_in_a_batch(name, tiny_model):
    """mlx-lm keeps four first tokens alone and none in a batch."""
    model = tiny_model(name)
    rows = prefilled_rows(model, PROMPTS, bounded).step(N)
    fresh_jobs = [Job(p, N, cache=bounded(model)) for p in PROMPTS]
    by_generator = batched(model, fresh_jobs, step=16)
    for row, prompt in enumerate(PROMPTS):
        reference = alone(model, bounded, prompt)
        assert_same(reference, rows.run(row))
        assert_same(reference, by_generator[row])
    assert can_batch(bounded(model))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_does_not_depend_on_slices_and_has_an_effect(name, tiny_model):
    """With keep = 0 a window is slice-invariant."""
    model = tiny_model(name)
    reference = alone(model, bounded, PROMPTS[0])
    for step in (5, 2048):
        assert_same(reference, alone(model, bounded, PROMPTS[0], step=step))
    assert_differs(cold(model, PROMPTS[0], N), reference)
    assert_same(cold(model, PROMPTS[1][:15], N), alone(model, bounded, PROMPTS[1][:15]))


def test_a_bound_bounds_the_memory(tiny_model):
    """After a token the ring is as long as the bound, however long the prompt was."""
    model = tiny_model("llama")
    caches = held_by(model, prompt_of(200), bounded)
    prefill(model, caches, [1])
    assert {c.keys.shape[2] for c in caches} == {BOUND}
    assert {c.offset for c in caches} == {200}


def test_a_bound_of_one_sees_one_token(tiny_model):
    model = tiny_model("llama")

    def one(model):
        return make_caches(model, max_kv_size=1)

    assert_same(alone(model, one, PROMPTS[0]), prefilled_rows(model, PROMPTS, one).step(N).run(0))


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_every_number_of_bits_on_offer_fits_every_usual_head(bits, width):
    """mlx-lm sizes its buffers wrongly for 5 bits of 128, so such bits are not offered."""
    cache = QuantKVCache(group_size=32, bits=bits)
    k = mx.random.normal((1, 2, 3, width))
    keys, _ = cache.update_and_fetch(k, k)
    expected = mx.quantize(k, group_size=32, bits=bits)
    assert all(mx.array_equal(a, b) for a, b in zip(keys, expected, strict=True))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_kv_size": 0}, "max_kv_size is 0; it must be from 1 to 2147483647"),
        ({"max_kv_size": -3}, "max_kv_size is -3"),
        ({"max_kv_size": 2**31}, "max_kv_size is 2147483648"),
        ({"kv_bits": 5}, "kv_bits is 5; it must be one of 2, 4, 8"),
        ({"kv_bits": 0}, "kv_bits is 0"),
        ({"kv_bits": 4, "kv_group_size": 7}, "kv_group_size is 7; it must be one of 32, 64, 128"),
        ({"kv_bits": 4, "max_kv_size": 9}, "cannot be combined"),
        ({"at_rest": "q2"}, "at_rest is 'q2'; it must be one of exact, q8, q4"),
        ({"kv_bits": 8, "at_rest": "q8"}, "cannot be combined"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message, tiny_model):
    """Before any token is fed."""
    with pytest.raises(BadInput, match=message):
        make_caches(tiny_model("llama"), **setting)


@pytest.mark.parametrize("name", ["gemma2", "stablelm"])
def test_models_that_cannot_take_quantised_keys_say_so(name, tiny_model):
    """By name and in one line, whatever their attention does with keys that are not an array."""
    model = tiny_model(name)
    said = f"^{name} does not run with these KV options .its attention takes arrays only.; [^\n]*$"
    with pytest.raises(BadInput, match=said):
        probe(model, make_caches(model, kv_bits=8, kv_group_size=32))


def test_quantised_keys_are_refused_on_cuda(tiny_model, monkeypatch):
    """MLX is wrong with them there; what keeps no rows has nothing to quantise."""
    model, states = tiny_model("llama"), tiny_model("mamba2")
    caches = make_caches(model, kv_bits=8, kv_group_size=32)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    with pytest.raises(BadInput, match="on CUDA; remove kv_bits"):
        probe(model, caches)
    assert probe(states, make_caches(states, kv_bits=8, kv_group_size=32))


def test_a_kernel_that_mlx_lacks_is_named():
    """As MLX says it: the model's attention is not to blame."""

    def model(tokens, cache):
        raise RuntimeError("No implementation for problem shape: 1x1x128x8.\nAnd more.")

    with pytest.raises(BadInput, match=r"options \(No implementation for problem shape: [^)\n]*\)"):
        probe(model, [QuantKVCache(group_size=32, bits=8)])

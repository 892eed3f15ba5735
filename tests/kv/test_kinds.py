"""Every cache class of mlx-lm is of a known kind, and tells how much it holds."""

import importlib
import inspect
import pkgutil

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    LRUPromptCache,
    RotatingKVCache,
    make_prompt_cache,
)

from keepwarm.errors import CacheMismatch, UnsupportedCache
from keepwarm.kv.batch import empty_batch, merge
from keepwarm.kv.kinds import KINDS, Kind, is_batched, is_empty, kind_of, leaves, token_count
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache
from keepwarm.kv.rows import RowsKVCache, RowsQuantKVCache
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import prefill, prompt_of

BASE = inspect.getmro(KVCache)[1]
NOT_A_CACHE = {BASE, LRUPromptCache}
OURS = {QuantKVCache, BatchQuantizedKVCache, RowsKVCache, RowsQuantKVCache}


def fed(cache, n=5):
    cache.update_and_fetch(mx.zeros((1, 1, n, 64)), mx.zeros((1, 1, n, 64)))
    return cache


def state(n_rows=1):
    cache = ArraysCache(2)
    cache[0], cache[1] = mx.zeros((n_rows, 3)), mx.zeros((n_rows, 3))
    return cache


def cache_classes_of_mlx_lm():
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            loaded = importlib.import_module(f"mlx_lm.models.{module.name}")
        except (Exception, SystemExit):  # a model that needs a package of its own
            continue
        for cls in filter(inspect.isclass, vars(loaded).values()):
            is_cache = issubclass(cls, BASE) or cls.__name__.endswith("Cache")
            if is_cache and cls.__module__ == loaded.__name__:
                yield cls


def test_every_cache_class_of_mlx_lm_has_a_kind(capfd):
    """All of them, and no class that is gone."""
    assert set(cache_classes_of_mlx_lm()) - NOT_A_CACHE == KINDS.keys() - OURS


def test_a_window_that_keeps_first_tokens_is_a_state():
    """It depends on how the prompt was sliced."""
    assert kind_of(RotatingKVCache(8)) is Kind.WINDOW
    assert kind_of(RotatingKVCache(8, keep=4)) is Kind.STATE


class Sliding(RotatingKVCache):
    """An unknown class, although its parent is known."""


@pytest.mark.parametrize(
    "ask", [kind_of, is_empty, is_batched, lambda c: token_count([c]), lambda c: list(leaves([c]))]
)
@pytest.mark.parametrize("cache", [Sliding(8), CacheList(KVCache(), Sliding(8))])
def test_an_unknown_class_is_refused_by_name_and_never_guessed(ask, cache):
    if ask is kind_of and isinstance(cache, CacheList):
        cache = cache[1]
    with pytest.raises(UnsupportedCache, match=r"tests\.kv\.test_kinds\.Sliding is not a cache"):
        ask(cache)


@pytest.mark.parametrize("thing", [None, (1, 2), mx.zeros((1, 2, 3, 4))])
def test_what_is_no_cache_is_refused_too(thing):
    """A tuple or an array is not a cache."""
    with pytest.raises(UnsupportedCache, match="is not a cache class known to Keepwarm"):
        kind_of(thing)


@pytest.mark.parametrize("name", CACHE_KINDS)
def test_the_token_count_of_a_model_is_what_it_was_fed(name, tiny_model):
    """By offsets, since `size()` is 0 for half of the classes."""
    model = tiny_model(name)
    caches = make_prompt_cache(model)
    assert token_count(caches) is None
    assert all(is_empty(c) for c in caches)
    for fed_so_far in (20, 40, 41):  # past the windows and chunks of 32
        before = fed_so_far - 20 if fed_so_far < 41 else 40
        prefill(model, caches, prompt_of(41)[before:fed_so_far])
        counted = token_count(caches)
        only_states = all(isinstance(leaf, ArraysCache) for _, leaf in leaves(caches))
        assert counted == (None if only_states else fed_so_far)
    assert not any(is_empty(c) or is_batched(c) for c in caches)


def test_layers_must_agree_on_the_token_count():
    with pytest.raises(CacheMismatch, match=r"Layer 1\.1: the token count is 4, expected 5"):
        token_count([fed(KVCache()), CacheList(state(), fed(KVCache(), 4))])


@pytest.mark.parametrize("cache", [fed(KVCache()), state(), fed(RotatingKVCache(8))])
def test_a_batch_has_no_single_count(cache):
    batch = merge([[cache], [cache]])
    assert is_batched(batch[0])
    assert not is_batched(cache)
    with pytest.raises(UnsupportedCache, match="Layer 0 is a batch; extract a row first"):
        token_count(batch)


def test_padding_makes_a_batch():
    """An empty batch of states has no arrays yet; its padding tells."""
    assert is_batched(empty_batch([ArraysCache(2)], 2)[0])
    assert is_batched(CacheList(KVCache(), state(n_rows=2)))
    assert not is_batched(CacheList(KVCache(), state()))


def test_a_composite_is_empty_when_all_its_parts_are():
    assert is_empty(CacheList(ArraysCache(2), CacheList(KVCache())))
    assert not is_empty(CacheList(ArraysCache(2), fed(KVCache())))
    partly = ArraysCache(2)
    partly[1] = mx.zeros((1, 3))
    assert not is_empty(partly)


def test_leaves_have_paths():
    caches = [KVCache(), CacheList(ArraysCache(1), CacheList(KVCache(), RotatingKVCache(8)))]
    assert [path for path, _ in leaves(caches)] == ["0", "1.0", "1.1.0", "1.1.1"]

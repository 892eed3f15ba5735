"""A generator's cache has one entry a layer, of the class that the model asks for."""

import pytest
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from tests.kit.runs import Job, batched, prompt_of
from tests.kv.test_batch_models import BATCHABLE


@pytest.mark.parametrize("name", BATCHABLE)
def test_one_entry_a_layer_of_the_models_class(name, tiny_model):
    model = tiny_model(name)
    (run,) = batched(model, [Job(prompt_of(40), 2)])
    assert [type(entry) for entry in run.cache] == [type(c) for c in make_prompt_cache(model)]


def test_gemma_3_has_8_caches_of_all_tokens_and_40_windows():
    """The shape of the real one, which some take for 48 windows."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 8, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8}
    args = gemma3_text.ModelArgs(model_type="gemma3_text", **shape, **heads)
    caches = make_prompt_cache(gemma3_text.Model(args))
    assert [i for i, cache in enumerate(caches) if type(cache) is KVCache] == list(range(5, 48, 6))
    assert [type(cache) for cache in caches].count(RotatingKVCache) == 40

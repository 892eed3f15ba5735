"""Every mlx-lm name and fact that Keepwarm builds on, so that a new release breaks here.

Here: which names we use, single caches and functions. Batches, the generator and known defects
stand in `test_mlx_lm_batch.py`.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    dynamic_roll,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

import keepwarm
from tests.contract.rows import filled, held, positions, rows
from tests.kit.checkpoints import write_checkpoint

SOURCE = Path(keepwarm.__file__).parent
ROOMS_WITH_MLX_LM = {"kv", "engine"}

# What `src/keepwarm` takes from mlx-lm; each name is used by a test below.
USED = {
    "mlx_lm.models.base": {"create_causal_mask"},
    "mlx_lm.models.cache": {
        "ArraysCache",
        "BatchKVCache",
        "BatchRotatingKVCache",
        "CacheList",
        "ChunkedKVCache",
        "ConcatenateKVCache",
        "KVCache",
        "QuantizedKVCache",
        "RotatingKVCache",
        "can_trim_prompt_cache",
        "dynamic_roll",
        "make_prompt_cache",
        "trim_prompt_cache",
    },
    "mlx_lm.models.llama": {"Model", "ModelArgs"},
    "mlx_lm.utils": {"dequantize_model", "load_model", "load_tokenizer"},
}

# Every cache class of mlx-lm; `keepwarm.kv` classifies each, or refuses it by name.
CACHE_CLASSES = {
    "cache.ArraysCache",
    "cache.BatchKVCache",
    "cache.BatchRotatingKVCache",
    "cache.CacheList",
    "cache.ChunkedKVCache",
    "cache.ConcatenateKVCache",
    "cache.KVCache",
    "cache.LRUPromptCache",  # a store of caches, not a cache
    "cache.QuantizedKVCache",
    "cache.RotatingKVCache",
    "cache._BaseCache",
    "deepseek_v41.LayerCache",
}
# Model files that need a package we do not install.
NOT_IMPORTABLE = {"olmo"}


# --- What we use, and nothing else -----------------------------------------------------------


def names_from_mlx_lm(tree):
    """(module, name) of every import from mlx-lm, through a module's alias too."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(a.name.split(".")[0] == "mlx_lm" for a in node.names), "use from-imports"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
            for a in node.names:
                if importlib.util.find_spec(node.module).submodule_search_locations is None:
                    yield node.module, a.name
                else:
                    modules[a.asname or a.name] = f"{node.module}.{a.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in modules:
                yield modules[node.value.id], node.attr


def sources():
    return {p: ast.parse(p.read_text()) for p in SOURCE.rglob("*.py")}


def test_the_names_in_use_are_the_names_listed_here():
    """S0-19: a new name needs a test in this file first."""
    found = {pair for tree in sources().values() for pair in names_from_mlx_lm(tree)}
    listed = {(module, name) for module, names in USED.items() for name in names}
    assert found == listed, {"to list and test": found - listed, "to drop": listed - found}


def test_every_listed_name_is_used_by_a_test_here():
    trees = [ast.parse(p.read_text()) for p in Path(__file__).parent.glob("test_mlx_lm*.py")]
    bodies = [n for t in trees for n in t.body if isinstance(n, ast.FunctionDef | ast.Assign)]
    seen = {n.id for b in bodies for n in ast.walk(b) if isinstance(n, ast.Name)}
    seen |= {n.attr for b in bodies for n in ast.walk(b) if isinstance(n, ast.Attribute)}
    assert set().union(*USED.values()) <= seen


def test_no_private_name_is_imported():
    assert not [name for names in USED.values() for name in names if name.startswith("_")]


def test_only_two_rooms_know_mlx_lm():
    """So that an upstream change has two rooms to change here, not ten."""
    users = {p for p, tree in sources().items() if list(names_from_mlx_lm(tree))}
    assert {p.relative_to(SOURCE).parts[0] for p in users} <= ROOMS_WITH_MLX_LM


def test_every_cache_class_of_mlx_lm_is_known(capfd):
    """S3-11: a class that is new upstream is classified before anybody meets it."""
    found, broken = set(), set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            loaded = importlib.import_module(f"mlx_lm.models.{module.name}")
        except (Exception, SystemExit):
            broken.add(module.name)
            continue
        found |= {f"{module.name}.{c.__name__}" for c in cache_classes_of(loaded)}
    assert found == CACHE_CLASSES, {"new": found - CACHE_CLASSES, "gone": CACHE_CLASSES - found}
    assert broken <= NOT_IMPORTABLE


def cache_classes_of(module):
    base = inspect.getmro(KVCache)[1]
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            if issubclass(cls, base) or cls.__name__.endswith("Cache"):
                yield cls


# --- Single caches ---------------------------------------------------------------------------

STATES = {
    KVCache: ("keys", "values", "offset"),
    RotatingKVCache: ("keys", "values", "offset", "keep", "max_size", "_idx"),
    QuantizedKVCache: ("keys", "values", "offset", "group_size", "bits"),
    ChunkedKVCache: ("keys", "values", "offset", "chunk_size", "start_position"),
    ConcatenateKVCache: ("keys", "values"),
    BatchKVCache: ("keys", "values", "offset", "left_padding", "_idx"),
    BatchRotatingKVCache: (
        *("keys", "values", "offset", "left_padding"),
        *("max_size", "_offset", "_idx", "rotated"),
    ),
    ArraysCache: ("cache", "left_padding", "lengths"),
}
ARGUMENTS = {
    KVCache: (),
    RotatingKVCache: ("max_size", "keep"),
    QuantizedKVCache: ("group_size", "bits"),
    ChunkedKVCache: ("chunk_size",),
    ConcatenateKVCache: (),
    BatchKVCache: ("left_padding",),
    BatchRotatingKVCache: ("max_size", "left_padding"),
    ArraysCache: ("size", "left_padding"),
    CacheList: ("caches",),
}
VALUES = {"max_size": 8, "left_padding": [0], "chunk_size": 8, "size": 2}


def build(cls):
    return cls(**{name: VALUES[name] for name in ARGUMENTS[cls] if name in VALUES})


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_constructor_arguments(cls):
    assert tuple(inspect.signature(cls).parameters) == ARGUMENTS[cls]


@pytest.mark.parametrize("cls", STATES)
def test_state_is_these_attributes_in_this_order(cls):
    """S3-41: one tuple of arrays and scalars, no `meta_state`; the codec goes by the attributes."""
    cache = build(cls)
    if cls is not ArraysCache:
        filled(cache, 5)
    assert len(cache.state) == len(STATES[cls])
    assert all(a is getattr(cache, n) for a, n in zip(cache.state, STATES[cls], strict=True))
    assert not hasattr(cache, "meta_state")
    copy = cls.from_state(cache.state)
    assert all(getattr(copy, n) is getattr(cache, n) for n in STATES[cls])


@pytest.mark.parametrize("cls", [KVCache, ConcatenateKVCache, ChunkedKVCache, RotatingKVCache])
def test_update_returns_all_rows_and_moves_the_offset(cls):
    """S3-01: what a model calls on every layer."""
    cache = cls(**({"chunk_size": 64} if cls is ChunkedKVCache else {}), **_window(cls))
    k, v = rows(10)
    cache.update_and_fetch(k[..., :6, :], v[..., :6, :])
    keys, values = cache.update_and_fetch(k[..., 6:, :], v[..., 6:, :])
    assert mx.array_equal(keys, k)
    assert mx.array_equal(values, v)
    assert cache.offset == 10


def _window(cls):
    return {"max_size": 64} if cls is RotatingKVCache else {}


def test_kv_buffers_grow_by_256_and_hold_more_rows_than_tokens():
    """S3-47: so only the first `offset` rows may be kept."""
    cache = filled(KVCache(), 10)
    assert cache.keys.shape == (1, 2, 256, 64)
    assert filled(cache, 250).keys.shape[2] == 10 + 256
    assert cache.nbytes == 2 * (10 + 256) * 2 * 64 * 4


def test_trim_moves_the_offset_and_leaves_the_rows():
    """Trimmed tokens stay in the buffer: what is saved must be cut to the offset."""
    cache = filled(KVCache(), 10)
    assert (cache.trim(4), cache.offset) == (4, 6)
    assert mx.any(cache.keys[..., 6:10, :] != 0)


def test_rotating_cache_is_a_ring_when_decoding_and_longer_after_a_prefill():
    """S3-02, S3-28, S3-29: hence temporal order before anything is kept."""
    cache = RotatingKVCache(max_size=8)
    k, v = positions(12)
    for i in range(12):
        cache.update_and_fetch(k[..., i : i + 1, :], v[..., i : i + 1, :])
    assert held(cache.keys) == [8, 9, 10, 11, 4, 5, 6, 7]
    assert (cache.offset, cache._idx, cache.is_trimmable()) == (12, 4, False)
    long = RotatingKVCache(max_size=8)
    long.update_and_fetch(*positions(20))
    assert (held(long.keys), long._idx, long.size()) == (list(range(20)), 20, 8)


def test_rotating_cache_keeps_the_first_tokens_with_keep():
    cache = RotatingKVCache(max_size=8, keep=2)
    k, v = positions(12)
    for i in range(12):
        cache.update_and_fetch(k[..., i : i + 1, :], v[..., i : i + 1, :])
    assert held(cache.keys)[:2] == [0, 1]


def test_rotating_cache_can_be_trimmed_only_before_it_is_full():
    """S3-37."""
    assert filled(RotatingKVCache(max_size=8), 7).is_trimmable()
    assert not filled(RotatingKVCache(max_size=8), 8).is_trimmable()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_quantised_cache_holds_triples_of_mx_quantize(bits, group):
    """S3-03, S3-52: (weights, scales, biases), the same whether a row came early or late."""
    k, v = rows(10)
    cache = QuantizedKVCache(group_size=group, bits=bits)
    cache.update_and_fetch(k[..., :6, :], v[..., :6, :])
    keys, _ = cache.update_and_fetch(k[..., 6:, :], v[..., 6:, :])
    for got, expected in zip(keys, mx.quantize(k, group_size=group, bits=bits), strict=True):
        assert mx.array_equal(got, expected)
    converted = filled(KVCache(), 10).to_quantized(group_size=group, bits=bits)
    assert isinstance(converted, QuantizedKVCache)
    assert converted.offset == 10


def test_chunked_cache_drops_old_rows_before_a_forward():
    """S3-04: `start_position` is the position of its first row."""
    cache = ChunkedKVCache(chunk_size=8)
    cache.update_and_fetch(*positions(20))
    cache.maybe_trim_front()
    assert (cache.offset, cache.start_position) == (20, 12)
    assert held(cache.keys) == list(range(12, 20))


def test_arrays_cache_is_a_list_without_an_offset():
    """S3-05: the token count of a state must be known elsewhere."""
    cache = ArraysCache(size=2)
    assert cache.cache == [None, None]
    assert cache.empty()
    assert not cache.is_trimmable()
    cache[0] = mx.zeros((1, 3))
    assert cache[0] is cache.cache[0]
    assert not hasattr(cache, "offset")


def test_cache_list_joins_its_parts():
    """S3-07: trimmable only if all are; its state names the classes."""
    cache = CacheList(filled(KVCache(), 5), ArraysCache(size=2))
    assert [name for _, name in cache.state] == ["KVCache", "ArraysCache"]
    assert isinstance(cache.caches, tuple)
    assert (cache[0].offset, cache.size(), cache.is_trimmable()) == (5, 5, False)


def test_layer_cache_has_no_way_in_from_outside():
    """S3-11: why `deepseek_v41` is refused by name."""
    assert not any(hasattr(LayerCache, name) for name in ("from_state", "merge", "trim"))
    assert LayerCache.state.fset is None


@pytest.mark.parametrize("name", ["__len__", "__bool__"])
def test_caches_have_no_length_and_no_truth(name):
    """S3-50: a cache must never be truth-tested; it is true even when empty."""
    assert not any(hasattr(cls, name) for cls in ARGUMENTS)


# --- Functions -------------------------------------------------------------------------------


def test_make_prompt_cache_ignores_max_kv_size_where_the_model_makes_its_own(tiny_model):
    """S3-35: only a model without `make_cache` gets a window, and that one has keep = 4."""
    own = make_prompt_cache(tiny_model("llama"), max_kv_size=32)
    assert {type(c) for c in own} == {KVCache}
    bounded = make_prompt_cache(tiny_model("qwen3"), max_kv_size=32)
    assert {(type(c), c.max_size, c.keep) for c in bounded} == {(RotatingKVCache, 32, 4)}
    assert {type(c) for c in make_prompt_cache(tiny_model("qwen3"))} == {KVCache}


def test_trim_prompt_cache_trims_all_layers_or_none():
    """S3-37: the answer must be checked: 0 means that nothing was trimmed."""
    caches = [filled(KVCache(), 10), filled(KVCache(), 10)]
    assert can_trim_prompt_cache(caches)
    assert trim_prompt_cache(caches, 3) == 3
    assert [c.offset for c in caches] == [7, 7]
    mixed = [filled(KVCache(), 10), ArraysCache(size=2)]
    assert not can_trim_prompt_cache(mixed)
    assert (trim_prompt_cache(mixed, 3), mixed[0].offset) == (0, 10)


def test_dynamic_roll_rolls_every_row_by_its_own_shift():
    """S3-20, S3-39, S3-66."""
    x = mx.arange(8).reshape(2, 4)
    assert dynamic_roll(x, mx.array([1, 2]), axis=1).tolist() == [[3, 0, 1, 2], [6, 7, 4, 5]]
    assert dynamic_roll(x, mx.array([-1, 0]), axis=1).tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]


def test_causal_mask_hides_left_padding_and_what_left_the_window():
    """S3-21, S3-46: (batch, 1, N, offset + N), true where a query may look."""
    mask = create_causal_mask(2, offset=2, window_size=3, left_padding=mx.array([0, 2]))
    assert mask.shape == (2, 1, 2, 4)
    assert mask[:, 0].astype(mx.int32).tolist() == [
        [[1, 1, 1, 0], [0, 1, 1, 1]],
        [[0, 0, 1, 0], [0, 0, 1, 1]],
    ]


def test_prompt_cache_files_have_three_parts_of_metadata(tmp_path):
    """S1-04, S3-36: the layout of 0.32: user's metadata, class names, scalars; padding is written."""
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, [filled(KVCache(), 10), ArraysCache(size=1)], {"k": "v"})
    arrays, metadata = mx.load(file, return_metadata=True)
    assert arrays["0.0"].shape[2] == 256
    assert metadata["0.k"] == "v"
    assert [metadata["1.0"], metadata["1.1"]] == ["KVCache", "ArraysCache"]
    (kv, state), user = load_prompt_cache(file, return_metadata=True)
    assert (kv.offset, state.cache, user) == (10, [None], {"k": "v"})


def test_a_model_loads_from_a_directory_and_can_be_quantised_back_and_forth(tmp_path):
    """`dequantize_model` replaces the layers in place; the file's config is passed on."""
    directory = write_checkpoint(tmp_path / "tiny")
    model, config = load_model(directory, lazy=True)
    assert isinstance(model, llama.Model)
    paths = [path for path, _ in tree_flatten(model.parameters())]
    same = llama.Model(llama.ModelArgs.from_dict(config))
    assert paths == [path for path, _ in tree_flatten(same.parameters())]
    nn.quantize(model, group_size=32, bits=8)
    assert paths != [path for path, _ in tree_flatten(model.parameters())]
    dequantize_model(model)
    assert paths == [path for path, _ in tree_flatten(model.parameters())]


def test_given_end_tokens_are_added_to_the_tokenizers_own(tmp_path):
    directory = write_checkpoint(tmp_path / "tiny")
    tokenizer = load_tokenizer(directory, {"trust_remote_code": False}, eos_token_ids=5)
    assert tokenizer.eos_token_ids == {tokenizer.eos_token_id, 5}
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"

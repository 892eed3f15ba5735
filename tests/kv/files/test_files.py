"""Prompt-cache files of every mlx-lm format and of Swift, and invalid ones."""

import resource
import struct
from contextlib import contextmanager

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from keepwarm.errors import (
    BadCacheFile,
    BadInput,
    CacheMismatch,
    InsufficientResources,
    UnsupportedCache,
)
from keepwarm.kv.codec import encode, live_bytes
from keepwarm.kv.files.dialects import Dialect
from keepwarm.kv.files.prompt_cache import export_prompt_cache, import_prompt_cache
from keepwarm.kv.kinds import token_count
from keepwarm.kv.layout import probe
from keepwarm.kv.make import make_caches
from keepwarm.kv.quant import QuantKVCache
from tests.kit.compare import assert_differs, assert_same
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import cold, continue_from, prefill, prompt_of, settle
from tests.kv.files.golden import (
    GOLDEN,
    HOLDS,
    METADATA,
    assert_file_holds,
    assert_same_encoding,
    state,
)

SAVEABLE = sorted(set(CACHE_KINDS) - {"deepseek_v41"})
PROMPT = prompt_of(90)
HELD = 84
N = 5


# What damage done by the version that wrote it makes unreadable, and the reason we give.
REFUSED = {
    "batch": "extract one sequence",
    "0.30.4-list": "did not save the classes of a CacheList's parts",
    "0.30.4-chunked-slid": "252 rows have left the window and no layer stores the token count",
    "0.31.3-chunked-slid": "252 rows have left the window and no layer stores the token count",
}
GOLDEN_FILES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))


def refusal(stem):
    return REFUSED.get(stem) or REFUSED.get(stem.split("-", 1)[1])


READABLE = [stem for stem in GOLDEN_FILES if not refusal(stem)]


@pytest.mark.parametrize("stem", READABLE)
def test_files_of_every_version_are_read_and_become_current_ones(stem, tmp_path):
    """Every row, number and name that each version of mlx-lm saved."""
    version, name = stem.split("-", 1)
    found, path = (
        assert_file_holds(GOLDEN / f"{stem}.safetensors", HOLDS[name]),
        tmp_path / "c.safetensors",
    )
    is_current = version == "0.32.2"
    assert found.dialect is (Dialect.MLX_LM if is_current else Dialect.EARLY_MLX_LM)
    export_prompt_cache(path, found.caches, found.metadata)
    again = assert_file_holds(path, HOLDS[name])
    assert (again.metadata, again.dialect) == (METADATA, Dialect.MLX_LM)
    theirs = load_prompt_cache(str(path))
    for cache, loaded in zip(found.caches, theirs, strict=True):
        assert_same_encoding(encode(cache), encode(loaded))


@pytest.mark.parametrize("stem", [s for s in GOLDEN_FILES if refusal(s)])
def test_files_their_version_damaged(stem):
    """What a version did not save is refused with the reason, never guessed."""
    with pytest.raises(BadCacheFile, match=refusal(stem)):
        import_prompt_cache(GOLDEN / f"{stem}.safetensors")


def test_golden_files_are_there():
    versions = {stem.split("-", 1)[0] for stem in GOLDEN_FILES}
    assert versions == {"0.24.1", "0.30.4", "0.31.3", "0.32.2"}
    assert {stem.split("-", 1)[1] for stem in GOLDEN_FILES} == {*HOLDS, "batch"}


@pytest.mark.parametrize("name", SAVEABLE)
def test_export_goes_on_in_mlx_lm(name, tiny_model, tmp_path):
    """Every kind of layer, exported by us, loaded and continued by mlx-lm."""
    model, path = tiny_model(name), tmp_path / "cache.safetensors"
    reference = cold(model, PROMPT, N, step=HELD)
    export_prompt_cache(path, prefill(model, make_prompt_cache(model), PROMPT[:HELD]))
    loaded = load_prompt_cache(str(path))
    assert_same(reference, continue_from(model, loaded, PROMPT[HELD:], N))


@pytest.mark.parametrize("name", SAVEABLE)
def test_import_goes_on_from_mlx_lm(name, tiny_model, tmp_path):
    """Every kind of layer, saved by mlx-lm while decoding, continued by us."""
    model, path = tiny_model(name), tmp_path / "cache.safetensors"
    caches = prefill(model, make_prompt_cache(model), PROMPT[:40])
    prefill(model, caches, PROMPT[40:HELD], step=1)
    save_prompt_cache(str(path), caches)
    found = import_prompt_cache(path, probe(model, make_prompt_cache(model)))
    assert found.dialect is Dialect.MLX_LM
    reference = continue_from(model, caches, PROMPT[HELD:], N)
    assert_same(reference, continue_from(model, found.caches, PROMPT[HELD:], N))


def test_import_of_another_prompt_differs(tiny_model, tmp_path):
    """The control: were the rows not used, the runs above would agree all the same."""
    model, path = tiny_model("llama"), tmp_path / "cache.safetensors"
    other = prefill(model, make_prompt_cache(model), prompt_of(HELD, seed=1))
    export_prompt_cache(path, other)
    run = continue_from(model, import_prompt_cache(path).caches, PROMPT[HELD:], N)
    assert_differs(cold(model, PROMPT, N, step=HELD), run)


def test_quantized_both_ways(tiny_model, tmp_path):
    """Our quantised class goes out under mlx-lm's name and comes back as ours, bit by bit."""
    model, path = tiny_model("llama"), tmp_path / "cache.safetensors"
    caches = make_caches(model, kv_bits=4, kv_group_size=32)
    export_prompt_cache(path, prefill(model, caches, PROMPT[:HELD]))
    theirs = load_prompt_cache(str(path))
    assert {type(cache) for cache in theirs} == {QuantizedKVCache}
    ours = import_prompt_cache(path).caches
    assert {type(cache) for cache in ours} == {QuantKVCache}
    reference = continue_from(model, caches, PROMPT[HELD:], N)
    for loaded in (theirs, ours):
        run = continue_from(model, loaded, PROMPT[HELD:], N)
        assert_same(reference, run, bitwise=True)


def filled(*lengths, cache=None, dtype=mx.bfloat16, heads=2, width=64):
    cache = KVCache() if cache is None else cache
    for n_tokens in lengths:
        keys = mx.random.normal((1, heads, n_tokens, width), key=mx.random.key(3)).astype(dtype)
        cache.update_and_fetch(keys, keys)
    return settle([cache])[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: filled(10),
        lambda: filled(300, 1),
        lambda: filled(700, cache=RotatingKVCache(512)),
        lambda: filled(300, cache=QuantKVCache(64, 8), dtype=mx.float32),
    ],
)
def test_file_is_as_large_as_its_live_rows(make, tmp_path):
    """Neither padding nor what a window has let go is written."""
    path, caches = tmp_path / "cache.safetensors", [make()]
    export_prompt_cache(path, caches)
    (header,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert header < 2000
    assert path.stat().st_size <= 1.05 * live_bytes(caches) + 8 + header


def test_trimmed_tokens_do_not_leave(tmp_path):
    """Privacy: mlx-lm writes the rows of trimmed tokens into its file; we write none."""
    cache = KVCache()
    secret = mx.full((1, 1, 3, 64), 1234.5)
    cache.update_and_fetch(mx.zeros((1, 1, 5, 64)), mx.zeros((1, 1, 5, 64)))
    cache.update_and_fetch(secret, secret)
    cache.trim(3)
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    export_prompt_cache(ours, [cache])
    save_prompt_cache(str(theirs), [cache])
    needle = struct.pack("<f", 1234.5)
    assert needle in theirs.read_bytes()
    assert needle not in ours.read_bytes()
    export_prompt_cache(ours, import_prompt_cache(theirs).caches)
    assert needle not in ours.read_bytes()


def test_export_does_not_change_the_caches(tmp_path):
    cache = filled(10)
    before, shape = mx.array(cache.keys), cache.keys.shape
    export_prompt_cache(tmp_path / "cache.safetensors", [cache])
    assert cache.keys.shape == shape
    assert cache.offset == 10
    assert mx.array_equal(cache.keys, before)


def test_empty_and_nested_layers(tmp_path):
    """Empty layers, half-filled states and composites in composites come back as they were."""
    path, half = tmp_path / "cache.safetensors", ArraysCache(3)
    half[1] = state(1, 2, 2)
    inner = CacheList(half, filled(4, dtype=mx.float32))
    caches = [KVCache(), ArraysCache(2), RotatingKVCache(8), QuantKVCache(64, 4)]
    caches += [CacheList(KVCache(), KVCache()), CacheList(inner)]
    export_prompt_cache(path, caches)
    for cache, found in zip(caches, import_prompt_cache(path).caches, strict=True):
        assert_same_encoding(encode(cache), encode(found))
    assert [c.empty() for c in load_prompt_cache(str(path))[:5]] == [True] * 5


def test_import_is_evaluated(tmp_path):
    """F7: mlx loads lazily; a file overwritten after our import changes nothing."""
    path, cache = tmp_path / "cache.safetensors", filled(10)
    export_prompt_cache(path, [cache])
    found = import_prompt_cache(path).caches[0]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert mx.array_equal(found.keys, cache.keys[..., :10, :])


def test_import_checks_the_model(tiny_model, tmp_path):
    path = tmp_path / "cache.safetensors"
    llama, gemma = tiny_model("llama"), tiny_model("gemma3_text")
    export_prompt_cache(path, prefill(llama, make_prompt_cache(llama), PROMPT))
    assert token_count(import_prompt_cache(path, layout_of_model(llama)).caches) == 90
    with pytest.raises(CacheMismatch, match="number of layers is 2, expected 4"):
        import_prompt_cache(path, layout_of_model(gemma))


def layout_of_model(model):
    return probe(model, make_prompt_cache(model))


@contextmanager
def files_no_larger_than(n_bytes):
    """As on a full disk, writes past this size fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_export_is_all_or_nothing(tmp_path):
    """A failed write leaves the old file intact and no other file."""
    path = tmp_path / "cache.safetensors"
    export_prompt_cache(path, [filled(10)])
    before = path.read_bytes()
    with files_no_larger_than(4096), pytest.raises(InsufficientResources, match="needs 51,"):
        export_prompt_cache(path, [filled(200, heads=1)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_export_onto_a_directory(tmp_path):
    path = tmp_path / "cache.safetensors"
    path.mkdir()
    with pytest.raises(BadInput, match="cannot be written: Is a directory"):
        export_prompt_cache(path, [filled(10)])
    assert list(tmp_path.iterdir()) == [path]


def test_export_is_private(tmp_path):
    path = tmp_path / "cache.safetensors"
    export_prompt_cache(path, [filled(10)])
    assert path.stat().st_mode & 0o777 == 0o600


class Homemade(KVCache):
    """An unknown class."""


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([BatchKVCache([0, 1])], "Layer 0: feed the left-padded slice first"),
        ([KVCache(), CacheList(BatchKVCache([0]))], "Layer 0: KVCache is not a batch; merge rows"),
        ([Homemade()], "Homemade is not a cache class"),
        ([LayerCache(8)], "LayerCache cannot be exported: mlx-lm does not save its window"),
        ([ConcatenateKVCache()], "cannot load an empty ConcatenateKVCache"),
        ([CacheList(CacheList())], "cannot load an empty CacheList"),
    ],
)
def test_export_refuses(caches, reason, tmp_path):
    with pytest.raises(UnsupportedCache, match=reason):
        export_prompt_cache(tmp_path / "cache.safetensors", caches)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "caches", "metadata", "reason"),
    [
        ("cache.bin", [KVCache()], {}, "must end in .safetensors"),
        ("c.safetensors", [], {}, "without layers"),
        ("no/where/c.safetensors", [KVCache()], {}, "cannot be written: No such file"),
        ("c.safetensors", [KVCache()], {"n": 3}, "must be strings"),
        ("c.safetensors", [KVCache()], {"a.b": "x"}, "'a.b' would be changed"),
        ("c.safetensors", [KVCache()], {"7": "x"}, "'7' would be changed"),
        ("c.safetensors", [KVCache()], {"": "x"}, "'' would be changed"),
    ],
)
def test_export_asks_for_sense(name, caches, metadata, reason, tmp_path):
    with pytest.raises(BadInput, match=reason):
        export_prompt_cache(tmp_path / name, caches, metadata)


def test_dotted_keys_of_others_come_back_whole(tmp_path):
    """mlx-lm writes such keys and gives them back nested; we give them back as written."""
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(str(path), [filled(3)], {"a.b": "x", "a.c": "y"})
    assert import_prompt_cache(path).metadata == {"a.b": "x", "a.c": "y"}

"""Prompt-cache files of every mlx-lm there has been, of Swift, and of nobody's making."""

import json
import resource
import struct
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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

from keepwarm.errors import BadCacheFile, BadInput, CacheMismatch, NotEnough, UnsupportedCache
from keepwarm.kv.codec import encode, live_bytes
from keepwarm.kv.dialects import Dialect
from keepwarm.kv.files import export_prompt_cache, import_prompt_cache
from keepwarm.kv.kinds import token_count
from keepwarm.kv.layout import probe
from keepwarm.kv.make import make_caches
from keepwarm.kv.quant import QuantKVCache
from tests.kit.compare import assert_differs, assert_same
from tests.kit.models import ARCHITECTURES
from tests.kit.runs import cold, continue_from, prefill, prompt_of, settle

GOLDEN = Path(__file__).parents[1] / "data" / "prompt-cache"
METADATA = {"model": "tiny", "note": "made by save_prompt_cache"}
SAVEABLE = sorted(set(ARCHITECTURES) - {"deepseek_v41"})
PROMPT = prompt_of(90)
HELD = 84
N = 5


def pattern(tokens, heads=2, width=4, dtype=mx.float16):
    """K of these tokens as make_golden.py feeds them; V is its negative."""
    t = mx.array(list(tokens))[:, None]
    return mx.stack([64 * t + 8 * h + mx.arange(width)[None] for h in range(heads)])[None].astype(
        dtype
    )


def state(*shape):
    return mx.arange(1, 1 + shape[1] * shape[2]).reshape(shape).astype(mx.float32)


def kv(tokens, **shape):
    keys = pattern(tokens, **shape)
    return {"keys": keys, "values": -keys}


def quantized(tokens, group_size=32, bits=4):
    keys = pattern(tokens, heads=1, width=32)
    names = ("weights", "scales", "biases")
    return {
        f"{name}_{part}": array
        for name, rows in (("keys", keys), ("values", -keys))
        for part, array in zip(names, mx.quantize(rows, group_size, bits), strict=True)
    }


STATES = {"state0": state(1, 3, 2), "state1": state(1, 2, 4)}
KV_5 = ("KVCache", kv(range(5)), {"offset": 5})
WINDOW_5 = ("RotatingKVCache", kv(range(5)), {"offset": 5, "keep": 0, "max_size": 8})
TWO_STATES = ("ArraysCache", STATES, {"size": 2})
SLID = (
    "ChunkedKVCache",
    kv(range(252, 259), heads=1),
    {"offset": 259, "chunk_size": 4, "start_position": 252},
)

# What every golden file of this name holds, whichever version wrote it: class, tensors, scalars.
HOLDS = {
    "kv": [KV_5, KV_5],
    "kv-bfloat16": [("KVCache", kv(range(5), dtype=mx.bfloat16), {"offset": 5})],
    "kv-trimmed": [KV_5],
    "kv-empty": [("KVCache", {}, {"offset": 0})] * 2,
    "rotating": [WINDOW_5, WINDOW_5],
    "rotating-padded": [WINDOW_5],
    "rotating-turned": [
        ("RotatingKVCache", kv(range(3, 11)), {"offset": 11, "keep": 0, "max_size": 8})
    ],
    "rotating-kept": [
        (
            "RotatingKVCache",
            kv([0, 1, *range(5, 11)]),
            {"offset": 11, "keep": 2, "max_size": 8},
        )
    ],
    "rotating-long": [
        ("RotatingKVCache", kv(range(3, 11)), {"offset": 11, "keep": 0, "max_size": 8})
    ],
    "quantized": [
        ("QuantizedKVCache", quantized(range(5)), {"offset": 5, "group_size": 32, "bits": 4})
    ],
    "chunked": [
        ("ChunkedKVCache", kv(range(5)), {"offset": 5, "chunk_size": 256, "start_position": 0})
    ],
    "chunked-slid": [SLID],
    "chunked-slid-with-kv": [SLID, ("KVCache", kv(range(259), heads=1), {"offset": 259})],
    "arrays": [TWO_STATES],
    "mamba": [TWO_STATES],
    "list": [[TWO_STATES, WINDOW_5]],
}
# What damage done by the version that wrote it makes unreadable, and the reason we give.
REFUSED = {
    "batch": "extract one sequence",
    "0.30.4-list": "did not save the classes of a CacheList's parts",
    "0.30.4-chunked-slid": "252 rows have slid out and no layer says how many tokens",
    "0.31.3-chunked-slid": "252 rows have slid out and no layer says how many tokens",
}
GOLDEN_FILES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))


def refusal(stem):
    return REFUSED.get(stem) or REFUSED.get(stem.split("-", 1)[1])


def assert_holds(encoded, expected):
    if isinstance(expected, list):
        assert encoded.cls == "CacheList"
        for part, wanted in zip(encoded.parts, expected, strict=True):
            assert_holds(part, wanted)
        return
    cls, tensors, scalars = expected
    assert (encoded.cls, dict(encoded.scalars)) == (cls, scalars)
    assert set(encoded.tensors) == set(tensors)
    for name, array in tensors.items():
        got = encoded.tensors[name]
        assert (got.shape, got.dtype) == (array.shape, array.dtype), name
        assert mx.array_equal(got, array), name


def assert_file_holds(path, expected):
    found = import_prompt_cache(path)
    for cache, wanted in zip(found.caches, expected, strict=True):
        assert_holds(encode(cache), wanted)
    return found


READABLE = [stem for stem in GOLDEN_FILES if not refusal(stem)]


@pytest.mark.parametrize("stem", READABLE)
def test_old_files_become_current_ones(stem, tmp_path):
    """S0-54: imported and exported, a file of any version holds the same in today's layout."""
    found, path = import_prompt_cache(GOLDEN / f"{stem}.safetensors"), tmp_path / "c.safetensors"
    export_prompt_cache(path, found.caches, found.metadata)
    again = assert_file_holds(path, HOLDS[stem.split("-", 1)[1]])
    assert (again.metadata, again.dialect) == (METADATA, Dialect.MLX_LM)
    theirs = load_prompt_cache(str(path))
    for cache, loaded in zip(found.caches, theirs, strict=True):
        assert_same_encoding(encode(cache), encode(loaded))


@pytest.mark.parametrize("stem", READABLE)
def test_files_of_every_version(stem):
    """S0-54, S3-36, S3-41: every row, number and name of what each version of mlx-lm saved."""
    version, name = stem.split("-", 1)
    found = assert_file_holds(GOLDEN / f"{stem}.safetensors", HOLDS[name])
    assert found.metadata == METADATA
    is_current = version == "0.32.2"
    assert found.dialect is (Dialect.MLX_LM if is_current else Dialect.EARLY_MLX_LM)


@pytest.mark.parametrize("stem", [s for s in GOLDEN_FILES if refusal(s)])
def test_files_their_version_damaged(stem):
    """S3-36: what a version did not save is refused with the reason, never guessed."""
    with pytest.raises(BadCacheFile, match=refusal(stem)):
        import_prompt_cache(GOLDEN / f"{stem}.safetensors")


def test_golden_files_are_there():
    versions = {stem.split("-", 1)[0] for stem in GOLDEN_FILES}
    assert versions == {"0.24.1", "0.30.4", "0.31.3", "0.32.2"}
    assert {stem.split("-", 1)[1] for stem in GOLDEN_FILES} == {*HOLDS, "batch"}


def test_s1_04_prompt_cache_files_interoperate(tiny_model, tmp_path):
    """S1-04: a file of mlx-lm's comes in, goes on as before, goes out, and mlx-lm goes on."""
    model, path = tiny_model("llama"), str(tmp_path / "theirs.safetensors")
    reference = cold(model, PROMPT, N, step=HELD)
    save_prompt_cache(path, prefill(model, make_prompt_cache(model), PROMPT[:HELD]), {"a": "b"})
    ours = import_prompt_cache(path)
    out = tmp_path / "ours.safetensors"
    export_prompt_cache(out, ours.caches, ours.metadata)
    theirs, metadata = load_prompt_cache(str(out), return_metadata=True)
    assert metadata == {"a": "b"}
    assert_same(reference, continue_from(model, theirs, PROMPT[HELD:], N), bitwise=True)
    assert_same(reference, continue_from(model, ours.caches, PROMPT[HELD:], N), bitwise=True)


@pytest.mark.parametrize("name", SAVEABLE)
def test_export_goes_on_in_mlx_lm(name, tiny_model, tmp_path):
    """S3-36: every kind of layer, exported by us, loaded and continued by mlx-lm."""
    model, path = tiny_model(name), tmp_path / "cache.safetensors"
    reference = cold(model, PROMPT, N, step=HELD)
    export_prompt_cache(path, prefill(model, make_prompt_cache(model), PROMPT[:HELD]))
    loaded = load_prompt_cache(str(path))
    assert_same(reference, continue_from(model, loaded, PROMPT[HELD:], N))


@pytest.mark.parametrize("name", SAVEABLE)
def test_import_goes_on_from_mlx_lm(name, tiny_model, tmp_path):
    """S3-36: every kind of layer, saved by mlx-lm while decoding, continued by us."""
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


def test_bfloat16_survives(tmp_path):
    """F7: numpy knows no bfloat16, so nothing on the way may pass through it."""
    path, cache = tmp_path / "cache.safetensors", filled(300)
    export_prompt_cache(path, [cache])
    for loaded in (load_prompt_cache(str(path))[0], import_prompt_cache(path).caches[0]):
        assert loaded.keys.dtype == mx.bfloat16
        assert mx.array_equal(loaded.keys[..., :300, :], cache.keys[..., :300, :])


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


def assert_same_encoding(a, b):
    assert (a.cls, a.scalars, set(a.tensors)) == (b.cls, b.scalars, set(b.tensors))
    assert all(mx.array_equal(a.tensors[name], b.tensors[name]) for name in a.tensors)
    for part, other in zip(a.parts, b.parts, strict=True):
        assert_same_encoding(part, other)


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
    with pytest.raises(CacheMismatch, match="number of layers is 2, expected 8"):
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
    """A write that fails leaves the old file whole, and nothing beside it."""
    path = tmp_path / "cache.safetensors"
    export_prompt_cache(path, [filled(10)])
    before = path.read_bytes()
    with files_no_larger_than(4096), pytest.raises(NotEnough, match="needs 51,"):
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
    """A class nobody knows."""


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ([BatchKVCache([0, 1])], "Layer 0 is a batch; extract a row first"),
        ([KVCache(), CacheList(BatchKVCache([0]))], "Layer 1 is a batch; extract a row first"),
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
        ("c.safetensors", [], {}, "no layers"),
        ("no/where/c.safetensors", [KVCache()], {}, "cannot be written: No such file"),
        ("c.safetensors", [KVCache()], {"n": 3}, "must be text"),
        ("c.safetensors", [KVCache()], {"a.b": "x"}, "'a.b' would come back changed"),
        ("c.safetensors", [KVCache()], {"7": "x"}, "'7' would come back changed"),
        ("c.safetensors", [KVCache()], {"": "x"}, "'' would come back changed"),
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


# Swift: layouts as `savePromptCache` of mlx-swift-lm writes them, rebuilt from its source.


def swift_file(path, *layers, metadata=None):
    """Each layer is (class, tensors in a row, numbers in a row)."""
    tensors, header = {}, {f"1.{key}": value for key, value in (metadata or {}).items()}
    for i, (cls, arrays, numbers) in enumerate(layers):
        tensors |= {f"{i}.{j}": array for j, array in enumerate(arrays)}
        header |= {f"0.{i}.{j}": number for j, number in enumerate(numbers)}
        header[f"2.{i}"] = cls
    mx.save_safetensors(str(path), tensors, header)
    return path


def pair(tokens, **shape):
    return list(kv(tokens, **shape).values())


SWIFT_KV = ("KVCache", pair(range(5)), [""])
SWIFT_RING = [10, 3, 4, 5, 6, 7, 8, 9]  # tokens 3 to 10 as a ring of eight that wrote row 0 last
SWIFT = {
    "kv": ([SWIFT_KV, ("KVCacheSimple", pair(range(5)), [""])], [KV_5, KV_5]),
    "empty": ([("KVCache", [], [""]), SWIFT_KV], [("KVCache", {}, {"offset": 0}), KV_5]),
    "rotating": (
        [("RotatingKVCache", pair(SWIFT_RING), ["0", "8", "256", "11", "1", "model"])],
        HOLDS["rotating-turned"],
    ),
    "rotating-before": (
        [
            ("RotatingKVCache", pair(SWIFT_RING), ["0", "8", "256", "11", "1"]),
            ("KVCache", pair(range(11)), [""]),
        ],
        [*HOLDS["rotating-turned"], ("KVCache", kv(range(11)), {"offset": 11})],
    ),
    "quantized": (
        [("QuantizedKVCache", list(quantized(range(5)).values()), ["256", "5", "32", "4"])],
        HOLDS["quantized"],
    ),
    "chunked": ([("ChunkedKVCache", pair(range(5)), ["256", "0"]), SWIFT_KV], None),
    "mamba": ([("MambaCache", list(STATES.values()), ["2", "0,1"])], [TWO_STATES]),
    "mamba-before": ([("MambaCache", list(STATES.values()), [""])], [TWO_STATES]),
    "arrays": (
        [("ArraysCache", [STATES["state1"]], ["3", "1"])],
        [("ArraysCache", {"state1": STATES["state1"]}, {"size": 3})],
    ),
    "list": (
        [
            (
                "CacheList",
                [*STATES.values(), *pair(range(5))],
                [
                    *("2", "MambaCache", "2", "2", "2", "0,1"),
                    *("RotatingKVCache", "2", "6", "0", "8", "256", "5", "5", "model"),
                ],
            )
        ],
        [[TWO_STATES, WINDOW_5]],
    ),
}
SWIFT["chunked"] = (SWIFT["chunked"][0], [*HOLDS["chunked"], KV_5])


@pytest.mark.parametrize("name", SWIFT)
def test_swift_files(name, tmp_path):
    """S3-42: Swift's files come in, although mlx-lm can load none of them."""
    layers, expected = SWIFT[name]
    path = swift_file(tmp_path / "swift.safetensors", *layers, metadata={"from": "swift"})
    found = assert_file_holds(path, expected)
    assert (found.dialect, found.metadata) == (Dialect.SWIFT, {"from": "swift"})


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (("TurboQuantKVCache", [], ["256", "4", "4", "4", "7"]), "'TurboQuantKVCache' is not a"),
        (("QuantizedKVCache", [state(1, 1, 2)] * 4, ["256", "5", "32", "4"]), "without biases"),
        (("ArraysCache", [state(1, 1, 2)], [""]), "did not save which of its slots"),
        (("ArraysCache", [state(1, 1, 2)], ["2", "0", "3"]), "padded for a batch"),
        (("ArraysCache", [state(1, 1, 2)], ["999999999999", "0"]), "do not fill slots"),
        (("ArraysCache", [state(1, 1, 2)], ["2", "5"]), "do not fill slots"),
        (("MambaCache", [state(1, 1, 2)], ["3", "0"]), "3 state arrays, expected 2"),
        (("ChunkedKVCache", pair(range(5)), ["None", "0"]), "'None' is not a count"),
        (("CacheList", pair(range(5)), [""]), "did not save the classes"),
        (("CacheList", pair(range(5)), ["2", "KVCache", "2", "1", ""]), "do not add up"),
        (("CacheList", pair(range(5)), ["1", "KVCache", "1", "1", ""]), "1 tensors, expected"),
        (("CacheList", [], ["1", "CacheList", "0", "999"] * 300), "nested more than 16 deep"),
        (("CacheList", pair(range(5)), ["x", "KVCache", "2", "1", ""]), "'x' is not a count"),
    ],
)
def test_swift_files_refused(layer, reason, tmp_path):
    """S3-42: what Swift saves and mlx-lm cannot hold is refused with the reason."""
    with pytest.raises(BadCacheFile, match=reason):
        import_prompt_cache(swift_file(tmp_path / "swift.safetensors", layer, SWIFT_KV))


def test_swift_vision_state_refused(tmp_path):
    path = swift_file(
        tmp_path / "swift.safetensors",
        ("__mlx_lm_state_v1__:KVCache", pair(range(5)), [""]),
        metadata={"__mlx_lm_state_version": "1", "__mlx_lm_state_count": "1"},
    )
    with pytest.raises(BadCacheFile, match="state of a Swift vision model"):
        import_prompt_cache(path)


# Files of nobody's making.


def test_not_a_file(tmp_path):
    with pytest.raises(BadCacheFile, match="cannot be read: No such file"):
        import_prompt_cache(tmp_path / "none.safetensors")
    with pytest.raises(BadCacheFile):
        import_prompt_cache(tmp_path)


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "text": b"This is not a cache, it is a letter.",
    "huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "header past the end": struct.pack("<Q", 4096) + b"{}",
    "no json": struct.pack("<Q", 2) + b"{{",
    "a list": struct.pack("<Q", 2) + b"[]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_not_safetensors(name, tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(BadCacheFile, match=r"bad\.safetensors (is not a whole|cannot be read)"):
        import_prompt_cache(path)


@pytest.mark.parametrize(
    "header",
    [
        {"0.0": tensor([4], 0, 8)},
        {"0.0": tensor([2], 8, 0)},
        {"0.0": tensor([2], 1 << 40, (1 << 40) + 8)},
        {"0.0": tensor([1 << 62, 1 << 62], 0, 8)},
        {"0.0": tensor([2], 0, 8), "0.1": tensor([2], 0, 8)},
        {"0.0": tensor([-2], 0, 8)},
        {"0.0": tensor([2], 0, 8, "F99")},
        {"0.0": tensor([8], 0, 8, "F8_E4M3")},
        {"0.0": tensor([2], 0, 8), "__metadata__": {"2.0": 7}},
        {"0.0": {"shape": [2]}},
    ],
)
def test_hostile_headers(header, tmp_path):
    path = raw_file(tmp_path / "bad.safetensors", header, b"\0" * 8)
    with pytest.raises(BadCacheFile, match=r"bad\.safetensors is"):
        import_prompt_cache(path)


def test_weights_are_not_a_cache(tmp_path):
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"lm_head.weight": mx.zeros((2, 2))}, {"format": "mlx"})
    with pytest.raises(BadCacheFile, match="without the metadata of a prompt cache"):
        import_prompt_cache(path)


@pytest.mark.parametrize("stem", ["0.31.3-kv", "0.32.2-rotating-turned", "0.32.2-list"])
def test_truncated_files(stem, tmp_path):
    whole, path = (GOLDEN / f"{stem}.safetensors").read_bytes(), tmp_path / "cut.safetensors"
    for length in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadCacheFile):
            import_prompt_cache(path)


def changed(path, stem, change):
    """A golden file with its tensors and metadata changed in place."""
    tensors, header = mx.load(str(GOLDEN / f"{stem}.safetensors"), return_metadata=True)
    change(tensors, header)
    mx.save_safetensors(str(path), tensors, header)
    return path


def put(**changes):
    """A change: `t_1_2` is tensor "1.2", `m_1_2` metadata; None removes."""

    def change(tensors, header):
        for name, value in changes.items():
            target = tensors if name.startswith("t_") else header
            key = name[2:].replace("_", ".")
            if value is None:
                del target[key]
            else:
                target[key] = value

    return change


def numbers(value):
    return mx.array(value)


K = pattern(range(5))
NEW, RING, OLD, OLD_RING = "0.32.2-kv", "0.32.2-rotating-turned", "0.31.3-kv", "0.31.3-rotating"


@pytest.mark.parametrize(
    ("stem", "change", "reason"),
    [
        (NEW, put(m_1_0="SecretCache"), "layer 0: 'SecretCache' is not a cache class"),
        (NEW, put(m_1_0="os.system"), "'os.system' is not a cache class"),
        (NEW, put(m_1_0="RotatingKVCache"), "there are 3 values, expected 6"),
        (NEW, put(m_1_0="BatchKVCache"), "extract one sequence"),
        (NEW, put(m_1_0="LayerCache"), "LayerCache cannot be read: mlx-lm does not save its"),
        (NEW, put(t_0_0=None), "values are missing"),
        (NEW, put(t_0_2=None), "the tensor '0.2' is missing"),
        (NEW, put(t_0_2=numbers(-1)), "claims -1 tokens and holds 256 rows"),
        (NEW, put(t_0_2=numbers(257)), "claims 257 tokens and holds 256 rows"),
        (NEW, put(t_0_2=numbers(5.0)), "'0.2' is no scalar"),
        (NEW, put(t_0_2=numbers([5, 5])), "'0.2' is no scalar"),
        (NEW, put(t_0_2=numbers(4)), "layers disagree: Layer 1: the token count is 5, expected 4"),
        (NEW, put(m_2_1_1="pickle"), "is no pickle that can be read"),
        (NEW, put(m_2_1_0="9.9"), "the tensor '9.9' is missing"),
        (NEW, put(t_7_0=K), "names 2 layers, but there are tensors of '7'"),
        (NEW, put(m_1_5="KVCache"), "names 3 layers, but there are class names with gaps"),
        (NEW, put(t_0_0_1=K), "does not fit the others"),
        (NEW, put(t_0_0=K[..., 0]), "has the shape"),
        (NEW, put(t_0_0=mx.concatenate([K, K])), "keys holds 2 sequences"),
        (NEW, put(t_0_0=K[:, :1]), "differ in heads or rows"),
        (NEW, put(t_0_0=mx.zeros((1, 2, 256, 4), mx.int32)), "keys cannot be of dtype"),
        (RING, put(t_0_2=numbers(7)), "claims 7 tokens up to row 3 and holds 8 rows"),
        (RING, put(t_0_3=numbers(8)), "a window of 8 cannot keep 8"),
        (RING, put(t_0_4=numbers(99)), "claims 11 tokens up to row 3 and holds 8 rows"),
        (RING, put(t_0_4=numbers(-8)), "a window of -8 cannot keep 0"),
        (RING, put(t_0_5=numbers(9)), "up to row 9 and holds 8 rows"),
        (RING, put(t_0_2=numbers(-1), t_0_5=numbers(-1)), "claims -1 tokens up to row -1"),
        ("0.32.2-quantized", put(t_0_4=numbers(7)), "7 bits in groups of 32 cannot be continued"),
        ("0.32.2-quantized", put(t_0_4=numbers(8)), "not quantised to 8 bits in groups of 32"),
        ("0.32.2-quantized", put(t_0_0_2=None), "there are 2 tensors of keys, expected 3"),
        ("0.32.2-quantized", put(t_0_0_0=mx.zeros((1, 1, 256, 4))), "keys_weights cannot be of"),
        ("0.32.2-chunked", put(t_0_4=numbers(9)), "claims tokens 9 to 5 and holds 256 rows"),
        ("0.32.2-chunked", put(t_0_3=numbers(0)), "claims tokens 0 to 5"),
        ("0.32.2-arrays", put(t_0_0_0=mx.zeros((2, 3, 2))), "state0 holds 2 sequences"),
        ("0.32.2-arrays", put(t_0_0_0=mx.array(1.0)), "state0 has the shape"),
        ("0.32.2-arrays", put(t_0_0_0=None), "slots are missing"),
        ("0.32.2-list", put(t_0_1_1=mx.array([ord(c) for c in "Evil"])), "layer 0.1: 'Evil'"),
        ("0.32.2-list", put(t_0_1_1=None), "the tensor '0.1.1' is missing"),
        ("0.32.2-list", put(t_0_1_1=mx.zeros(10**6, mx.int32)), "'0.1.1' is no string"),
        (OLD, put(m_2_0="Any"), "'Any' is not a cache class"),
        (OLD, put(m_2_0="BatchRotatingKVCache"), "extract one sequence"),
        (OLD, put(t_0_0=mx.zeros((1, 2)), t_0_1=mx.zeros((1, 2))), "has the shape"),
        (OLD, put(t_0_0=mx.zeros((1, 1, 1, 1, 1))), "must have four axes"),
        (OLD, put(t_0_1=None), "1 tensors, expected keys and values"),
        (OLD, put(m_2_0="RotatingKVCache"), "has 0 numbers, which no known version writes"),
        (OLD_RING, put(m_0_0_2="-5"), "'-5' is not a count"),
        (OLD_RING, put(m_0_0_2="9" * 40), "is not a count"),
        (OLD_RING, put(m_0_0_2="50"), "claims 50 tokens up to row 5 and holds 5 rows"),
        (OLD_RING, put(m_0_0_3=None), "has 3 numbers"),
        ("0.31.3-list", put(m_0_0_0_1="Evil"), "layer 0.1: 'Evil' is not"),
        ("0.31.3-list", put(m_0_0_1_1_0=None), "numbers are missing or misnamed"),
        ("0.31.3-quantized", put(m_0_0_1="33"), "4 bits in groups of 33"),
        ("0.31.3-chunked-slid-with-kv", put(m_0_0_1="300"), "claims tokens 300 to 259"),
        ("0.30.4-mamba", put(t_0_1=None), "1 state arrays, expected 2"),
    ],
)
def test_damaged_files(stem, change, reason, tmp_path):
    """Every lie in a file is one sentence that names the file, and the layer where there is one."""
    path = changed(tmp_path / "bad.safetensors", stem, change)
    with pytest.raises(BadCacheFile, match=reason) as caught:
        import_prompt_cache(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")


def test_deep_keys_are_refused(tmp_path):
    def deepen(tensors, header):
        tensors[".".join(["0"] * 5000)] = mx.zeros(1)

    path = changed(tmp_path / "bad.safetensors", NEW, deepen)
    with pytest.raises(BadCacheFile, match="does not fit the others"):
        import_prompt_cache(path)


FUZZ_FILES = ["0.24.1-quantized", "0.31.3-list", "0.31.3-rotating", "0.32.2-list", "0.32.2-arrays"]


@settings(max_examples=300, deadline=None)
@given(
    stem=st.sampled_from(FUZZ_FILES),
    where=st.floats(0, 1, exclude_max=True),
    what=st.sampled_from(b'019.,:-"{}[]aKL \0\xff'),
)
def test_any_byte_of_a_header_may_lie(stem, where, what, tmp_path_factory):
    """Whatever a header says, the answer is caches or one sentence."""
    whole = bytearray((GOLDEN / f"{stem}.safetensors").read_bytes())
    whole[int(where * (8 + struct.unpack("<Q", whole[:8])[0]))] = what
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(whole)
    with suppress(BadCacheFile):
        token_count(import_prompt_cache(path).caches)

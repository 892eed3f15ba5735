"""Prompt-cache files of Swift, rebuilt from what mlx-swift-lm's `savePromptCache` writes.

They were made from its source (August 2026), not by it: no file here comes from a Swift program.
"""

import mlx.core as mx
import pytest

from keepwarm.errors import BadCacheFile, BadInput, UnsupportedCache
from keepwarm.kv.files.dialects import Dialect
from keepwarm.kv.files.prompt_cache import export_prompt_cache, import_prompt_cache
from tests.kv.files.golden import (
    HOLDS,
    KV_5,
    STATES,
    TWO_STATES,
    WINDOW_5,
    assert_file_holds,
    kv,
    quantized,
    state,
)


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
        [("RotatingKVCache", pair(SWIFT_RING), ["0", "8", "256", "11", "1", "modelNative"])],
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
    "chunked": (
        [("ChunkedKVCache", pair(range(5)), ["256", "0"]), SWIFT_KV],
        [*HOLDS["chunked"], KV_5],
    ),
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
                    *("RotatingKVCache", "2", "6", "0", "8", "256", "5", "5", "modelNative"),
                ],
            )
        ],
        [[TWO_STATES, WINDOW_5]],
    ),
}


@pytest.mark.parametrize("name", SWIFT)
def test_swift_files(name, tmp_path):
    """Swift's files come in, although mlx-lm can load none of them."""
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
        (("ArraysCache", [state(1, 1, 2)], ["2", "0,0"]), "do not fill slots"),
        (("MambaCache", [state(1, 1, 2)], ["3", "0"]), "3 state arrays, expected 2"),
        (("ChunkedKVCache", pair(range(5)), ["None", "0"]), "'None' is not a count"),
        (("CacheList", pair(range(5)), [""]), "did not save the classes"),
        (
            ("CacheList", pair(range(5)), ["2", "KVCache", "2", "1", ""]),
            "do not match their counts",
        ),
        (("CacheList", pair(range(5)), ["1", "KVCache", "1", "1", ""]), "1 tensors, expected"),
        (("CacheList", [], ["1", "CacheList", "0", "999"] * 300), "nested more than 16 deep"),
        (("CacheList", pair(range(5)), ["x", "KVCache", "2", "1", ""]), "'x' is not a count"),
    ],
)
def test_swift_files_refused(layer, reason, tmp_path):
    """What Swift saves and mlx-lm cannot hold is refused with the reason."""
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


# What Swift's `loadPromptCache` takes: how many tensors and how many numbers, by class.
TAKEN = {
    "KVCache": ({0, 2}, {1}),
    "RotatingKVCache": ({0, 2}, {5, 6}),
    "QuantizedKVCache": ({0, 4, 6}, {4}),
    "ChunkedKVCache": ({0, 2}, {2}),
    "ArraysCache": (set(range(9)), {2}),
    "CacheList": (set(range(9)), set(range(99))),
}


@pytest.mark.parametrize("name", SWIFT)
def test_what_is_exported_for_swift_is_what_it_takes(name, tmp_path):
    """And comes back the same."""
    layers, expected = SWIFT[name]
    found = import_prompt_cache(swift_file(tmp_path / "swift.safetensors", *layers))
    file = tmp_path / "ours.safetensors"
    export_prompt_cache(file, found.caches, {"from": "here"}, "swift")
    again = assert_file_holds(file, expected)
    assert again.metadata == {"from": "here"}
    tensors, header = mx.load(str(file), return_metadata=True)
    for i in range(len(expected)):
        arrays, words = TAKEN[header[f"2.{i}"]]
        assert sum(key.startswith(f"{i}.") for key in tensors) in arrays
        assert sum(key.startswith(f"0.{i}.") for key in header) in words
        assert [header[f"0.{i}.0"]] == [""] or header[f"2.{i}"] != "KVCache"


def test_what_swift_cannot_hold_is_not_exported(tmp_path):
    slid = ("ChunkedKVCache", pair(range(5)), ["4", "3"])
    (chunked, _) = import_prompt_cache(
        swift_file(tmp_path / "s.safetensors", slid, ("KVCache", pair(range(8)), [""]))
    ).caches
    with pytest.raises(UnsupportedCache, match="does not save its token count"):
        export_prompt_cache(tmp_path / "o.safetensors", [chunked], dialect=Dialect.SWIFT)
    for other in (Dialect.EARLY_MLX_LM, "Swift", "mlx-swift-lm", None):
        with pytest.raises(BadInput, match="written for mlx-lm or swift, not for"):
            export_prompt_cache(tmp_path / "o.safetensors", [chunked], dialect=other)
    assert not (tmp_path / "o.safetensors").exists()

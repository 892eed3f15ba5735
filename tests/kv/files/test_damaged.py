"""Files that are no prompt cache, or lie about the one they hold: one sentence, no crash."""

import json
import struct
from contextlib import suppress

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwarm.errors import BadCacheFile
from keepwarm.kv.files.prompt_cache import import_prompt_cache
from keepwarm.kv.kinds import token_count
from tests.kv.files.golden import GOLDEN, pattern


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
    with pytest.raises(BadCacheFile, match=r"bad\.safetensors (is not a complete|cannot be read)"):
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


def test_a_long_header_is_not_parsed(tmp_path):
    """JSON of 100 MB, which safetensors allows, would take gigabytes of memory."""
    path = raw_file(tmp_path / "bad.safetensors", {"__metadata__": {"a": "x" * (16 << 20)}})
    with pytest.raises(BadCacheFile, match="header claims"):
        import_prompt_cache(path)


def test_weights_are_not_a_cache(tmp_path):
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), {"lm_head.weight": mx.zeros((2, 2))}, {"format": "mlx"})
    with pytest.raises(BadCacheFile, match="has no prompt-cache metadata"):
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
        (NEW, put(t_0_2=numbers(-1)), "claims -1 tokens but holds 256 rows"),
        (NEW, put(t_0_2=numbers(257)), "claims 257 tokens but holds 256 rows"),
        (NEW, put(t_0_2=numbers(5.0)), "'0.2' is not a valid scalar"),
        (NEW, put(t_0_2=numbers([5, 5])), "'0.2' is not a valid scalar"),
        (NEW, put(t_0_2=numbers(4)), "layers disagree: Layer 1: the token count is 5, expected 4"),
        (NEW, put(m_2_1_1="pickle"), "is not a valid pickle"),
        (NEW, put(m_2_1_0="9.9"), "the tensor '9.9' is missing"),
        (NEW, put(t_7_0=K), "names 2 layers, but there are tensors of '7'"),
        (NEW, put(m_1_5="KVCache"), "names 3 layers, but there are class names with gaps"),
        (NEW, put(t_0_0_1=K), "conflicts with the others"),
        (NEW, put(t_0_0=K[..., 0]), "has the shape"),
        (NEW, put(t_0_0=mx.concatenate([K, K])), "keys holds 2 sequences"),
        (NEW, put(t_0_0=K[:, :1]), "differ in heads or rows"),
        (NEW, put(t_0_0=mx.zeros((1, 2, 256, 4), mx.int32)), "keys cannot be of dtype"),
        (RING, put(t_0_2=numbers(7)), "claims 7 tokens up to row 3 but holds 8 rows"),
        (RING, put(t_0_3=numbers(8)), "a window of 8 cannot keep 8"),
        (RING, put(t_0_4=numbers(99)), "claims 11 tokens up to row 3 but holds 8 rows"),
        (RING, put(t_0_4=numbers(-8)), "a window of -8 cannot keep 0"),
        (RING, put(t_0_5=numbers(9)), "up to row 9 but holds 8 rows"),
        (RING, put(t_0_2=numbers(-1), t_0_5=numbers(-1)), "claims -1 tokens up to row -1"),
        ("0.32.2-quantized", put(t_0_4=numbers(7)), "7 bits in groups of 32 are not supported"),
        ("0.32.2-quantized", put(t_0_4=numbers(8)), "not quantised to 8 bits in groups of 32"),
        ("0.32.2-quantized", put(t_0_0_2=None), "there are 2 tensors of keys, expected 3"),
        ("0.32.2-quantized", put(t_0_0_0=mx.zeros((1, 1, 256, 4))), "keys_weights cannot be of"),
        ("0.32.2-chunked", put(t_0_4=numbers(9)), "claims tokens 9 to 5 but holds 256 rows"),
        ("0.32.2-chunked", put(t_0_3=numbers(0)), "claims tokens 0 to 5"),
        ("0.32.2-arrays", put(t_0_0_0=mx.zeros((2, 3, 2))), "state0 holds 2 sequences"),
        ("0.32.2-arrays", put(t_0_0_0=mx.array(1.0)), "state0 has the shape"),
        ("0.32.2-arrays", put(t_0_0_0=None), "slots are missing"),
        ("0.32.2-list", put(t_0_1_1=mx.array([ord(c) for c in "Evil"])), "layer 0.1: 'Evil'"),
        ("0.32.2-list", put(t_0_1_1=None), "the tensor '0.1.1' is missing"),
        ("0.32.2-list", put(t_0_1_1=mx.zeros(10**6, mx.int32)), "'0.1.1' is not a valid string"),
        (OLD, put(m_2_0="Any"), "'Any' is not a cache class"),
        (OLD, put(m_2_0="BatchRotatingKVCache"), "extract one sequence"),
        (OLD, put(t_0_0=mx.zeros((1, 2)), t_0_1=mx.zeros((1, 2))), "has the shape"),
        (OLD, put(t_0_0=mx.zeros((1, 1, 1, 1, 1))), "must have four axes"),
        (OLD, put(t_0_1=None), "1 tensors, expected keys and values"),
        (OLD, put(m_2_0="RotatingKVCache"), "has 0 numbers; no known version writes that many"),
        (OLD_RING, put(m_0_0_2="-5"), "'-5' is not a count"),
        (OLD_RING, put(m_0_0_2="9" * 40), "is not a count"),
        (OLD_RING, put(m_0_0_2="50"), "claims 50 tokens up to row 5 but holds 5 rows"),
        (OLD_RING, put(m_0_0_3=None), "has 3 numbers"),
        ("0.31.3-list", put(m_0_0_0_1="Evil"), "layer 0.1: 'Evil' is not"),
        ("0.31.3-list", put(m_0_0_1_1_0=None), "numbers are missing or misnamed"),
        ("0.31.3-quantized", put(m_0_0_1="33"), "4 bits in groups of 33"),
        ("0.31.3-chunked-slid-with-kv", put(m_0_0_1="300"), "claims tokens 300 to 259"),
        ("0.30.4-mamba", put(t_0_1=None), "1 state arrays, expected 2"),
    ],
)
def test_damaged_files(stem, change, reason, tmp_path):
    """Every error is one sentence that names the file, and the layer if there is one."""
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
    with pytest.raises(BadCacheFile, match="conflicts with the others"):
        import_prompt_cache(path)


FUZZ_FILES = ["0.24.1-quantized", "0.31.3-list", "0.31.3-rotating", "0.32.2-list", "0.32.2-arrays"]


@settings(max_examples=80, deadline=None)
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

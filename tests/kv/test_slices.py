"""A cache rebuilt from blocks continues exactly as the original."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from keepwarm.errors import CacheMismatch, CorruptBlock, UnsupportedCache
from keepwarm.kv.assembly import (
    concatenate_cache_blocks,
    create_cache_from_state,
    reconstruct_cache,
)
from keepwarm.kv.codec import encode
from keepwarm.kv.kinds import Kind, token_count
from keepwarm.kv.layout import layout_of, probe
from keepwarm.kv.slices import Block, check_block, cut_blocks
from keepwarm.prefix.blocks import BLOCK_TOKENS
from tests.kit.compare import assert_differs, assert_same
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import FedCounter, cold, continue_from, prefill, prompt_of

PROMPT = prompt_of(600)
N = 6


@pytest.fixture(scope="module")
def reference(tiny_model):
    """The cold run on PROMPT of each architecture, made once."""
    return cache(lambda name: cold(tiny_model(name), PROMPT, N, step=BLOCK_TOKENS))


@pytest.fixture(scope="module")
def captured(tiny_model):
    """Blocks of PROMPT, prefilled in whole blocks, with the layout the model was probed for."""

    def capture(name):
        model = tiny_model(name)
        return probe(model, make_prompt_cache(model)), blocks_of(model, PROMPT, [256, 256, 88])[1]

    return cache(capture)


def blocks_of(model, prompt, slices):
    """Prefill in slices of the given lengths, cutting blocks after each: the newest cut wins."""
    caches, fed, kept = make_prompt_cache(model), 0, {}
    for length in slices:
        prefill(model, caches, prompt[fed : fed + length])
        first_open = fed // BLOCK_TOKENS
        fed += length
        kept |= {b.index: b for b in cut_blocks(caches, fed, first_block=first_open)}
    return caches, [kept[i] for i in sorted(kept)]


@pytest.mark.parametrize("name", CACHE_KINDS)
def test_restored_at_the_end(name, tiny_model, reference):
    """Cut, rebuild, continue; only the last token is fed again. Other blocks give another run."""
    model = tiny_model(name)
    layout = probe(model, make_prompt_cache(model))
    _, blocks = blocks_of(model, PROMPT[:-1], [256, 256, 87])
    counter = FedCounter(model)
    run = continue_from(counter, reconstruct_cache(layout, blocks), PROMPT[-1:], N)
    assert_same(reference(name), run)
    assert counter.fed == 1 + N
    _, others = blocks_of(model, prompt_of(599, seed=9), [256, 256, 87])
    wrong = reconstruct_cache(layout, others)
    assert_differs(reference(name), continue_from(model, wrong, PROMPT[-1:], N))


@pytest.mark.parametrize("name", CACHE_KINDS)
@pytest.mark.parametrize("at", [41, 256, 257])
def test_restored_at_any_token(name, at, tiny_model, reference, captured):
    """Delta and window layers restore at every token, state layers where a state was taken."""
    model = tiny_model(name)
    layout, blocks = captured(name)
    if Kind.STATE in layout.kinds and at % BLOCK_TOKENS:
        with pytest.raises(CorruptBlock, match=f"no state as of token {at}"):
            reconstruct_cache(layout, blocks, at)
        return
    restored = reconstruct_cache(layout, blocks, at)
    assert token_count(restored) in (at, None)
    run = continue_from(model, restored, PROMPT[at:], N, step=BLOCK_TOKENS)
    assert_same(reference(name), run)


@pytest.mark.parametrize("name", ["gemma3_text", "llama4"])
def test_slices_of_any_length(name, tiny_model):
    """Capture does not depend on how the prompt was sliced."""
    model = tiny_model(name)
    layout = probe(model, make_prompt_cache(model))
    _, blocks = blocks_of(model, PROMPT, [100, 7, 300, 193])
    for at in (256, 600):
        run = continue_from(model, reconstruct_cache(layout, blocks, at), prompt_of(9, seed=3), N)
        again = cold(model, PROMPT[:at] + prompt_of(9, seed=3), N)
        assert_same(again, run)


def test_window_layers_restore_from_the_last_window_only(tiny_model):
    """Earlier blocks may have lost their window rows and still serve as links."""
    model = tiny_model("gemma3_text")
    layout = probe(model, make_prompt_cache(model))
    _, blocks = blocks_of(model, PROMPT, [256, 256, 88])
    bare = [Block(b.index, b.n_tokens, b.delta) for b in blocks[:-1]] + blocks[-1:]
    restored = reconstruct_cache(layout, bare, 600)
    again = cold(model, [*PROMPT, 5], N)
    assert_same(again, continue_from(model, restored, [5], N))
    with pytest.raises(CorruptBlock, match="Layer 0, block 0: rows 224 to 256 are missing"):
        reconstruct_cache(layout, bare, 256)


@pytest.mark.parametrize(("n_tokens", "first_rows"), [(287, [255, 0]), (288, [None, 0])])
def test_a_block_before_the_window_has_no_rows(n_tokens, first_rows):
    """Not an empty tensor, which would be refused when it is read."""
    held = RotatingKVCache(max_size=32)
    for length in [256, *[1] * (n_tokens - 256)]:
        rows = mx.zeros((1, 1, length, 4))
        held.update_and_fetch(rows, rows)
    blocks = list(cut_blocks([held], n_tokens))
    assert [block.first_rows.get("0") for block in blocks] == first_rows
    assert [bool(block.window) for block in blocks] == [row is not None for row in first_rows]


def test_block_count_and_names(tiny_model):
    """ceil(tokens / 256) blocks, tensors named L{layer}_B{block}_K and _V."""
    _, blocks = blocks_of(tiny_model("llama"), PROMPT, [600])
    assert [b.n_tokens for b in blocks] == [256, 256, 88]
    names = {name for b in blocks for name in b.delta}
    assert names == {f"L{i}_B{b}_{x}" for i in range(2) for b in range(3) for x in "KV"}
    _, blocks = blocks_of(tiny_model("falcon_h1"), PROMPT[:8], [8])
    assert {"L0.0_B0_S0", "L0.0_B0_S1"} <= set(blocks[0].state)
    assert {"L0.1_B0_K", "L0.1_B0_V"} <= set(blocks[0].delta)


def test_reconstructed_rows_stand_in_block_order(tiny_model):
    """Bit for bit, of one block and of several."""
    for n_tokens in (100, 600):
        live, blocks = blocks_of(tiny_model("llama"), PROMPT[:n_tokens], [n_tokens])
        for rebuilt, original in zip(reconstruct_cache(layout_of(live), blocks), live, strict=True):
            assert (type(rebuilt), rebuilt.offset) == (KVCache, n_tokens)
            for a, b in zip(rebuilt.keys_and_values(), original.keys_and_values(), strict=True):
                assert mx.array_equal(a, b)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_blocks_of_numpy_arrays_are_restored(name, tiny_model):
    model = tiny_model(name)
    live, blocks = blocks_of(model, PROMPT, [600])
    kinds = ("delta", "window", "state")
    taken = [
        replace(block, **{k: {n: np.array(x) for n, x in getattr(block, k).items()} for k in kinds})
        for block in blocks
    ]
    for restored, expected in zip(reconstruct_cache(layout_of(live), taken), live, strict=True):
        pairs = zip(encode(restored).arrays(), encode(expected).arrays(), strict=True)
        assert all(mx.array_equal(a, b) for a, b in pairs)


def test_no_tokens_give_empty_caches(tiny_model):
    """A layer without blocks is an empty cache of its class, not an error."""
    model = tiny_model("gemma3_text")
    fresh = make_prompt_cache(model)
    caches = reconstruct_cache(probe(model, make_prompt_cache(model)), [])
    assert [type(c) for c in caches] == [type(c) for c in fresh]
    assert all(c.empty() and c.offset == 0 for c in caches)
    assert_same(cold(model, PROMPT[:40], N), continue_from(model, caches, PROMPT[:40], N))


def test_a_missing_tensor_names_layer_and_block(tiny_model):
    live, blocks = blocks_of(tiny_model("llama"), PROMPT, [600])
    tensors = {k: v for k, v in blocks[1].delta.items() if k != "L1_B1_V"}
    with pytest.raises(CorruptBlock, match="Layer 1, block 1: L1_B1_V is missing"):
        reconstruct_cache(layout_of(live), [blocks[0], Block(1, 256, tensors), blocks[2]])


def test_a_missing_block_is_noticed(tiny_model):
    live, blocks = blocks_of(tiny_model("llama"), PROMPT, [600])
    with pytest.raises(CorruptBlock, match="Layer 0, block 1: rows 256 to 512 are missing"):
        reconstruct_cache(layout_of(live), [blocks[0], blocks[2]], 600)
    with pytest.raises(CorruptBlock, match="Layer 0, block 2: rows 512 to 600 are missing"):
        reconstruct_cache(layout_of(live), blocks[:2], 600)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(mx.float16), "Layer 1, block 1: the dtype is .*float16.*float32"),
        (lambda x: x[:, :1], r"Layer 1, block 1: the shape is \(1, 1, 256, 64\), expected"),
        (lambda x: x[..., :32], r"the shape is \(1, 2, 256, 32\), expected \(1, 2, 256, 64\)"),
        (lambda x: x[:, :, :255], r"the shape is \(1, 2, 255, 64\)"),
        (lambda x: mx.concatenate([x, x]), r"the shape is \(2, 2, 256, 64\)"),
        (lambda x: x[0], r"the shape is \(2, 256, 64\)"),
    ],
)
def test_every_shape_and_dtype_is_checked(change, message, tiny_model):
    """The error says layer, block, expected and got."""
    live, blocks = blocks_of(tiny_model("llama"), PROMPT, [600])
    tensors = dict(blocks[1].delta)
    tensors["L1_B1_K"] = change(tensors["L1_B1_K"])
    with pytest.raises(CacheMismatch, match=message):
        reconstruct_cache(layout_of(live), [blocks[0], Block(1, 256, tensors), blocks[2]])


def test_state_shapes_are_checked(tiny_model):
    live, (block,) = blocks_of(tiny_model("mamba2"), PROMPT[:50], [50])
    wrong = {name: array[:, :1] for name, array in block.state.items()}
    with pytest.raises(CacheMismatch, match="Layer 0, block 0: the shape"):
        reconstruct_cache(layout_of(live), [Block(0, 50, state=wrong)])


def test_a_cache_is_checked_against_the_model_before_use(tiny_model):
    """Layers, classes, heads, widths and dtypes, before any generator."""
    layout = probe(tiny_model("gemma3_text"), make_prompt_cache(tiny_model("gemma3_text")))
    live, _ = blocks_of(tiny_model("gemma3_text"), PROMPT, [600])
    layout.check(live)
    other, _ = blocks_of(tiny_model("llama"), PROMPT, [600])
    with pytest.raises(CacheMismatch, match="the number of layers is 2, expected 4"):
        layout.check(other)
    with pytest.raises(CacheMismatch, match="Layer 3: the class"):
        layout.check(live[:3] + live[2:3] + live[4:])
    assert layout.fits(live)
    assert not layout.fits(other)


def test_blocks_do_not_hold_the_cache_alive():
    """A block of a long cache costs its own bytes, not the cache's."""
    whole_cache = create_cache_from_state(*mx.random.normal((2, 1, 1, 65536, 64)))
    mx.clear_cache()
    before = mx.get_active_memory()
    block = next(cut_blocks([whole_cache]))
    whole = whole_cache.nbytes
    del whole_cache
    mx.clear_cache()
    assert mx.get_active_memory() - before < -0.9 * whole
    assert block.n_bytes == 2 * 256 * 64 * 4


def test_a_state_model_must_be_told_its_length(tiny_model):
    caches = prefill(tiny_model("mamba2"), make_prompt_cache(tiny_model("mamba2")), PROMPT[:9])
    assert token_count(caches) is None
    with pytest.raises(UnsupportedCache, match="pass n_tokens"):
        next(cut_blocks(caches))
    caches = prefill(tiny_model("llama"), make_prompt_cache(tiny_model("llama")), PROMPT[:9])
    with pytest.raises(CacheMismatch, match="the token count is 9, expected 8"):
        next(cut_blocks(caches, 8))


def test_concatenate_cache_blocks():
    """numpy or mx, three or four axes, checked against the first."""
    k = np.arange(2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4)
    keys, values = concatenate_cache_blocks([k[:, :3], k[:, 3:]], [k[:, :3, :2], k[:, 3:, :2]])
    assert keys.shape == (1, 2, 5, 4)
    assert np.array_equal(np.asarray(keys)[0], k)
    assert np.array_equal(np.asarray(values)[0], k[..., :2])
    with pytest.raises(CacheMismatch, match=r"Block 1: the shape is \(1, 2, 2, 3\)"):
        concatenate_cache_blocks([k[:, :3], k[:, 3:, :3]], [k[:, :3], k[:, 3:]])
    with pytest.raises(ValueError, match="zip"):
        concatenate_cache_blocks([k], [k, k])
    with pytest.raises(CorruptBlock, match="no blocks"):
        concatenate_cache_blocks([], [])


def test_concatenated_blocks_may_be_used_by_any_thread():
    """An array that was not evaluated belongs to the thread that made it."""
    lazy = mx.ones((1, 2, 3, 4)) * 3
    for array in concatenate_cache_blocks([lazy], [lazy]):
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lambda: array.sum().item()).result() == 3 * 2 * 3 * 4  # noqa: B023


def test_create_cache_from_state():
    """numpy or mx goes in, and the cache grows on."""
    k = np.ones((1, 2, 7, 4), np.float32)
    made = create_cache_from_state(k, mx.array(k))
    assert type(made) is KVCache
    assert made.size() == made.offset == 7
    keys, _ = made.update_and_fetch(mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 4)))
    assert keys.shape == (1, 2, 8, 4)


# States that grow.

NGRAM = "longcat_flash_ngram"  # its first layer holds the last three tokens


@pytest.mark.parametrize("n_tokens", [2, 40])
def test_a_state_that_grows_is_restored_at_every_length(n_tokens, tiny_model):
    """One token does not show how long it becomes."""
    model, prompt = tiny_model(NGRAM), PROMPT[:n_tokens]
    layout = probe(model, make_prompt_cache(model))
    caches, blocks = blocks_of(model, prompt, [n_tokens])
    assert caches[0][0].shape == (1, min(n_tokens, 3))
    layout.check(caches)
    for block in blocks:
        check_block(layout, block)
    rest = PROMPT[n_tokens : n_tokens + 5]
    restored, wrong = (reconstruct_cache(layout, blocks) for _ in range(2))
    wrong[0][0] = wrong[0][0] + 1
    live = continue_from(model, caches, rest, N)
    assert_same(live, continue_from(model, restored, rest, N), bitwise=True)
    assert_differs(live, continue_from(model, wrong, rest, N))


@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: mx.concatenate([x, x])])
def test_arrays_that_one_token_does_not_show_are_checked_by_their_axes(change, tiny_model):
    """The caches of deepseek_v41 have some only after more tokens; a row, and one sequence."""
    model = tiny_model("deepseek_v41")
    layout = probe(model, make_prompt_cache(model))
    _, (block,) = blocks_of(model, PROMPT[:50], [50])
    check_block(layout, block)
    known = {f"L{leaf.path}_B0_S{name[5:]}" for leaf in layout.leaves() for name in leaf.tensors}
    later = sorted(block.state.keys() - known)
    wrong = block.state | {later[0]: change(block.state[later[0]])}
    with pytest.raises(CacheMismatch, match=r"block 0: the shape .* expected \(1, rows, width\)"):
        check_block(layout, Block(0, 50, state=wrong))


def test_only_the_axis_that_grows_is_open(tiny_model):
    layout = probe(tiny_model(NGRAM), make_prompt_cache(tiny_model(NGRAM)))
    assert layout.layers[0].tensors["state0"].shape == (1, None)
    for array in (mx.zeros((2, 3), mx.int64), mx.zeros((1, 3, 1), mx.int64), mx.zeros((1, 3))):
        block = Block(0, 3, state={"L0_B0_S0": array})
        with pytest.raises(CacheMismatch, match=r"Layer 0, block 0: the (shape|dtype) is"):
            check_block(layout, block)
        with pytest.raises(CacheMismatch, match=r"Layer 0, block 0: the (shape|dtype) is"):
            reconstruct_cache(layout, [block])


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1"])
def test_a_state_that_does_not_grow_stays_closed(name, tiny_model):
    """So namespaces of stored blocks do not change."""
    model = tiny_model(name)
    leaves = probe(model, make_prompt_cache(model)).leaves()
    states = [
        spec.shape for leaf in leaves if leaf.kind is Kind.STATE for spec in leaf.tensors.values()
    ]
    assert states
    assert not any(None in shape for shape in states)

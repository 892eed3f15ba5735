"""mlx-lm's batch caches and BatchGenerator as Keepwarm relies on them, and their known defects.

A test named `test_defect_…` pins an upstream defect that we work around or refuse. When one
fails, mlx-lm has mended it: drop our workaround and the test.
"""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
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
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from tests.contract.rows import filled, held, positions, rows
from tests.kit.compare import assert_differs
from tests.kit.runs import Job, batched, cold, prefill, prompt_of, settle

PROMPT = prompt_of(60, seed=3)
OTHER = prompt_of(25, seed=4)


def merged(*lengths, cls=KVCache, **how):
    """A batch of single caches whose rows carry their positions."""
    singles = [cls(**how) for _ in lengths]
    for single, n in zip(singles, lengths, strict=True):
        if n:
            single.update_and_fetch(*positions(n))
    return cls.merge(singles)


# --- Batch caches ----------------------------------------------------------------------------


def test_merge_aligns_rows_at_the_right_and_copies():
    """An empty row is all padding; donors may be used again."""
    single = filled(KVCache(), 3)
    batch = KVCache.merge([single, KVCache(), filled(KVCache(), 5)])
    assert isinstance(batch, BatchKVCache)
    assert batch.left_padding.tolist() == [2, 5, 0]
    assert batch.offset.tolist() == [3, 0, 5]
    assert batch._idx == 5
    batch.update_and_fetch(*rows(1, batch=3))
    assert single.offset == 3


def test_merging_nothing_but_empty_rows_gives_an_empty_batch():
    """How a batch starts."""
    assert KVCache.merge([KVCache(), KVCache()]).empty()
    assert RotatingKVCache.merge([RotatingKVCache(8), RotatingKVCache(8)]).empty()
    assert ArraysCache.merge([ArraysCache(2), ArraysCache(2)]).left_padding.tolist() == [0, 0]


@pytest.mark.parametrize(("cls", "how"), [(KVCache, {}), (RotatingKVCache, {"max_size": 16})])
def test_extract_gives_a_row_back_without_its_padding(cls, how):
    batch = merged(3, 5, cls=cls, **how)
    row = batch.extract(0)
    assert type(row) is cls
    assert (row.offset, held(row.keys)) == (3, [0, 1, 2])


def test_prepare_and_finalize_turn_right_padding_into_left_padding():
    """`_right_padding` waits for `finalize`."""
    batch = BatchKVCache([0, 0, 0])
    batch.prepare(lengths=[4, 3, 2], right_padding=[0, 1, 2])
    batch.update_and_fetch(*positions(4, batch=3))
    assert batch._right_padding.tolist() == [0, 1, 2]
    batch.finalize()
    assert batch.left_padding.tolist() == [0, 1, 2]
    assert batch.offset.tolist() == [4, 3, 2]
    assert [held(batch.extract(i).keys) for i in range(3)] == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]


@pytest.mark.parametrize(
    "batch", [BatchKVCache([0, 0]), BatchRotatingKVCache(8, [0, 0])], ids=["kv", "rotating"]
)
def test_left_padding_is_taken_only_while_empty(batch):
    batch.prepare(left_padding=[1, 0])
    assert batch.left_padding.tolist() == [1, 0]
    assert batch.offset.tolist() == [-1, 0]
    batch.update_and_fetch(*rows(2, batch=2))
    with pytest.raises(ValueError, match="empty"):
        batch.prepare(left_padding=[0, 1])


def test_filter_keeps_rows_and_drops_padding_that_all_share():
    """A list of indices, in the order given."""
    batch = merged(3, 5, 4)
    batch.filter([2, 0])
    assert batch.left_padding.tolist() == [0, 1]
    assert (batch._idx, batch.offset.tolist()) == (4, [4, 3])


def test_extend_joins_another_batch_at_the_right_edge():
    batch = merged(3, 5)
    batch.extend(merged(7))
    assert batch.left_padding.tolist() == [4, 2, 0]
    assert [held(batch.extract(i).keys) for i in range(3)] == [[*range(n)] for n in (3, 5, 7)]


def test_batch_masks_hide_each_rows_padding():
    for batch in (merged(1, 3), merged(1, 3, cls=RotatingKVCache, max_size=8)):
        mask = batch.make_mask(1)[:, 0, 0, :4].astype(mx.int32)
        assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_rotating_rows_rotate_together_and_come_out_in_order():
    """`left_padding` may be negative after a rotation; `rotated` is set."""
    batch = merged(3, 6, cls=RotatingKVCache, max_size=8)
    assert isinstance(batch, BatchRotatingKVCache)
    for start in range(6, 11):
        batch.update_and_fetch(*positions(1, start, batch=2))
    assert batch.rotated
    assert (batch._offset, batch.offset.tolist()) == (11, [8, 11])
    assert held(batch.extract(1).keys) == list(range(3, 11))
    assert held(batch.extract(0).keys) == [0, 1, 2, *range(6, 11)]


def test_right_padding_evicts_no_token_of_a_window():
    """`_lengths` waits for `finalize`, and decoding before that is refused."""
    batch = merged(6, 6, cls=RotatingKVCache, max_size=8)
    batch.prepare(lengths=[4, 1], right_padding=[0, 3])
    batch.update_and_fetch(*positions(4, 6, batch=2))
    assert batch._lengths.tolist() == [10, 7]
    with pytest.raises(RuntimeError, match="finalize"):
        batch.update_and_fetch(*positions(1, 10, batch=2))
    batch.finalize()
    assert held(batch.extract(1).keys)[-7:] == list(range(7))


def test_rotating_caches_of_different_windows_do_not_merge():
    with pytest.raises(ValueError, match="same maximum size"):
        RotatingKVCache.merge([RotatingKVCache(8), RotatingKVCache(16)])


def test_arrays_cache_does_all_batch_operations():
    """It stays an ArraysCache; `lengths` and `left_padding` only make masks."""
    a, b = ArraysCache(1), ArraysCache(1)
    a[0], b[0] = mx.full((1, 2), 1.0), mx.full((1, 2), 2.0)
    batch = ArraysCache.merge([a, b, ArraysCache(1)])
    assert batch[0][:, 0].tolist() == [1, 2, 0]
    batch.extend(ArraysCache.merge([b]))
    batch.filter([3, 0])
    assert batch[0][:, 0].tolist() == [2, 1]
    assert batch.extract(1)[0].tolist() == [[1, 1]]
    batch.prepare(lengths=[2, 1])
    assert batch.make_mask(2).tolist() == [[True, True], [True, False]]
    batch.advance(1)
    assert batch.lengths.tolist() == [1, 0]
    batch.finalize()
    assert batch.make_mask(2) is None


def test_cache_list_passes_batch_operations_on():
    singles = [CacheList(filled(KVCache(), n), filled(RotatingKVCache(8), n)) for n in (3, 5)]
    batch = CacheList.merge(singles)
    assert [type(c) for c in batch.caches] == [BatchKVCache, BatchRotatingKVCache]
    batch.filter([1])
    assert [c.offset for c in batch.extract(0).caches] == [5, 5]


# --- BatchGenerator --------------------------------------------------------------------------


# --- Known defects ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [QuantizedKVCache, ConcatenateKVCache, ChunkedKVCache])
def test_defect_size_is_zero_and_there_is_no_merge(cls):
    """`token_count` goes by offsets; batching these is ours, or refused."""
    cache = filled(cls(8) if cls is ChunkedKVCache else cls(), 5)
    assert (cache.size(), cache.offset) == (0, 5)
    assert not hasattr(cache, "merge")


def test_defect_an_empty_quantised_cache_has_no_byte_count():
    with pytest.raises(AttributeError):
        _ = QuantizedKVCache().nbytes


def test_defect_trimming_a_concatenate_cache_is_lost_at_the_next_update():
    """It moves the offset, keeps the rows, and appends behind them."""
    cache = filled(ConcatenateKVCache(), 10)
    assert (cache.is_trimmable(), cache.trim(4), cache.offset) == (True, 4, 6)
    assert filled(cache, 1).offset == 11


def test_defect_loaded_batch_caches_cannot_be_prepared(tmp_path):
    """`from_state` skips `__init__`, so rows are extracted before they are saved."""
    assert not hasattr(BatchKVCache.from_state(merged(3, 5).state), "_right_padding")
    file = str(tmp_path / "batch.safetensors")
    save_prompt_cache(file, [merged(3, 5, cls=RotatingKVCache, max_size=8)])
    (loaded,) = load_prompt_cache(file)
    with pytest.raises(AttributeError, match="_lengths"):
        loaded.update_and_fetch(*positions(1, batch=2))


def test_defect_keep_is_lost_in_a_batch():
    """`max_kv_size` means keep = 0 here, alone and in a batch."""
    single = filled(RotatingKVCache(8, keep=4), 6)
    assert RotatingKVCache.merge([single]).extract(0).keep == 0


def test_defect_merge_takes_the_first_dtype_without_a_word():
    """Mixed dtypes are refused here."""
    mixed = [filled(KVCache(), 3, dtype=dtype) for dtype in (mx.bfloat16, mx.float32)]
    assert KVCache.merge(mixed).keys.dtype == mx.bfloat16


@pytest.mark.parametrize("batch", [BatchKVCache([0]), BatchRotatingKVCache(8, [0])])
def test_defect_extracting_from_an_empty_batch_raises(batch):
    with pytest.raises(TypeError):
        batch.extract(0)


def test_defect_extracting_an_empty_state_raises():
    with pytest.raises(TypeError):
        ArraysCache.merge([ArraysCache(2)]).extract(0)


def test_defect_a_quantised_cache_breaks_the_generator_only_at_its_first_step(tiny_model):
    """So caches are checked before they are inserted."""
    cache = [filled(QuantizedKVCache(), 5) for _ in range(2)]
    generator = BatchGenerator(tiny_model("llama"))
    generator.insert([PROMPT], caches=[cache])
    with pytest.raises(ValueError, match="does not yet support batching"):
        generator.next()


def test_defect_a_cache_shorter_than_its_tokens_is_believed(tiny_model):
    """Nothing is checked: a wrong length gives a wrong answer, not an error."""
    model = tiny_model("llama")
    short = prefill(model, make_prompt_cache(model), PROMPT[:35])
    (run,) = batched(model, [Job(PROMPT[40:], 4, PROMPT[:40], short)])
    assert_differs(cold(model, PROMPT, 4), run)


@pytest.mark.parametrize("name", ["mamba", "recurrent_gemma"])
def test_defect_padding_of_a_prompt_gets_into_the_state(name, tiny_model):
    """These models ignore `lengths`: prompts are prefilled one by one, never padded together."""
    model = tiny_model(name)
    _, short = batched(model, [Job(PROMPT, 4), Job(OTHER, 4)])
    assert_differs(cold(model, OTHER, 4), short)


def test_defect_with_keep_the_answer_depends_on_the_slices(tiny_model):
    """Why a rotating cache with keep > 0 is a state, good only where it was taken."""
    model = tiny_model("qwen3")
    outputs = []
    for step in (1, 16):
        cache = prefill(model, make_prompt_cache(model, max_kv_size=32), PROMPT, step)
        outputs.append(model(mx.array([[1]]), cache=settle(cache)))
    assert mx.abs(outputs[0] - outputs[1]).max().item() > 1e-3

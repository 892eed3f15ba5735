"""Rows that reach a device through slabs arrive as they were. Here the device is the CPU."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from keepwarm import kv
from keepwarm.cache.restore.records import block_of, records_of
from keepwarm.errors import BadRecord, CacheMismatch, CorruptBlock
from keepwarm.kv import slices
from keepwarm.kv.assembly import PIECE_BYTES, Destination, DeviceRows, Staging
from keepwarm.kv.buffers import FileArray, HostArray
from keepwarm.kv.layout import TensorSpec
from keepwarm.kv.slabs import Place, SlabArray, aligned
from keepwarm.kv.slices import cut_blocks, offload_blocks
from keepwarm.prefix.blocks import Namespace, chain
from keepwarm.records.record import Part, ReadBuffer, encode_record
from keepwarm.store.memory import MemoryTier
from tests.kit.models import CACHE_KINDS
from tests.kit.runs import prefill, prompt_of

NAMESPACE = Namespace(bytes(32))
SPEC = TensorSpec((1, 2, None, 8), mx.float32)


def rows_of(n_rows: int, seed: int) -> HostArray:
    words = np.random.default_rng(seed).random((1, 2, n_rows, 8), dtype=np.float32)
    return HostArray(words, mx.float32)


@pytest.fixture
def staging(pool):
    return Staging(pool, 1 << 20)


def target_of(n_rows: int, staging: Staging) -> DeviceRows:
    zeros = mx.zeros(SPEC.with_rows(n_rows))
    mx.eval(zeros)
    return DeviceRows(SPEC, n_rows, zeros, staging)


def add(staging: Staging, *writes: tuple[DeviceRows, int, HostArray]) -> None:
    """One record."""
    staging.open(sum(aligned(rows.n_bytes) for _, _, rows in writes))
    for target, at, rows in writes:
        target.write(at, rows)
    staging.publish()


def copy_all(staging: Staging) -> None:
    while not staging.is_empty:
        staging.copy(is_complete=True)


def test_threads_add_beside_each_other(staging):
    targets = [target_of(64 * 16 + 8, staging) for _ in range(3)]
    pieces = [[rows_of(16, 3 * seed + k) for k in range(3)] for seed in range(64)]

    def write(number: int) -> None:
        own = zip(targets, pieces[number], strict=True)
        add(staging, *((target, number * 16, piece) for target, piece in own))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(64)))
    copy_all(staging)
    for k, target in enumerate(targets):
        wanted = np.concatenate([own[k].words for own in pieces], axis=2)
        assert np.array_equal(np.asarray(target.array)[:, :, : 64 * 16], wanted)
        assert not np.asarray(target.array)[:, :, 64 * 16 :].any()


def test_what_was_added_after_a_wait_is_all_that_is_copied(staging):
    """A restore that was abandoned leaves nothing behind: its slabs go back to the pool."""
    target = target_of(40, staging)
    add(staging, (target, 0, rows_of(10, 1)))
    staging.wait()
    assert staging.is_empty
    add(staging, (target, 20, rows_of(10, 2)))
    copy_all(staging)
    assert not np.asarray(target.array)[:, :, :20].any()
    assert np.array_equal(np.asarray(target.array)[:, :, 20:30], rows_of(10, 2).words)


def test_rows_of_different_lengths_and_places(staging):
    """Nothing is merged that does not belong together."""
    one, other = target_of(400, staging), target_of(400, staging)
    a, b, c, d = (rows_of(n_rows, n_rows) for n_rows in (40, 40, 200, 30))
    add(staging, (one, 0, a), (other, 10, c))
    add(staging, (other, 210, d), (one, 40, b))  # the next rows, elsewhere in the slab
    add(staging, (one, 100, d))  # a gap
    copy_all(staging)
    found = np.asarray(one.array)
    assert np.array_equal(found[:, :, :80], np.concatenate([a.words, b.words], axis=2))
    assert not found[:, :, 80:100].any()
    assert np.array_equal(found[:, :, 100:130], d.words)
    found = np.asarray(other.array)
    assert np.array_equal(found[:, :, 10:240], np.concatenate([c.words, d.words], axis=2))


def test_a_tensor_of_width_zero(staging):
    """Some models keep one beside their keys."""
    target, spec = target_of(32, staging), TensorSpec((1, 2, None, 0), mx.float32)
    empty = DeviceRows(spec, 32, mx.zeros(spec.with_rows(32)), staging)
    nothing = HostArray(np.zeros((1, 2, 16, 0), np.float32), mx.float32)
    for at in (0, 16):
        add(staging, (target, at, rows_of(16, at)), (empty, at, nothing))
    copy_all(staging)
    wanted = np.concatenate([rows_of(16, at).words for at in (0, 16)], axis=2)
    assert np.array_equal(np.asarray(target.array), wanted)
    assert empty.array.shape == (1, 2, 32, 0)


def test_a_piece_waits_until_it_is_full(pool):
    staging = Staging(pool, PIECE_BYTES // 3)
    target = target_of(64, staging)
    for number in range(2):
        add(staging, (target, number * 16, rows_of(16, number)))
        staging.copy(is_complete=False)
    assert not np.asarray(target.array).any()
    add(staging, (target, 32, rows_of(16, 2)))
    staging.copy(is_complete=False)
    assert staging.is_empty
    wanted = np.concatenate([rows_of(16, n).words for n in range(3)], axis=2)
    assert np.array_equal(np.asarray(target.array)[:, :, :48], wanted)


def test_a_record_larger_than_a_piece_goes_alone(pool):
    staging = Staging(pool, 2 * PIECE_BYTES)
    target = target_of(16, staging)
    add(staging, (target, 0, rows_of(16, 0)))
    staging.copy(is_complete=False)
    assert staging.is_empty


def test_slabs_are_held_until_the_device_has_read_them(pool, staging):
    target = target_of(16, staging)
    slab = pool.take(rows_of(16, 0).n_bytes)
    is_gone = weakref.ref(slab)
    staging.add_block(slab, 0, 16, [Destination(target, 0, (Place(0, (1, 2, 16, 8), mx.float32),))])
    del slab
    staging.copy(is_complete=True)
    assert is_gone() is not None
    staging.wait()
    assert is_gone() is None


def test_another_thread_reads_what_was_copied(staging):
    """Arrays that are still lazy belong to the thread that made them."""
    target = target_of(16, staging)
    add(staging, (target, 0, rows_of(16, 0)))
    copy_all(staging)
    with ThreadPoolExecutor(1) as reader:
        found = reader.submit(lambda: np.asarray(target.array)).result()
    assert np.array_equal(found, rows_of(16, 0).words)


class Bytes:
    """Where an array comes from, as a file would be."""

    def __init__(self, rows: HostArray, fails: bool = False) -> None:
        self.data = memoryview(rows.words.tobytes())
        self.fails = fails
        self.n_direct = 0

    def read_into(self, pieces: list[np.ndarray]) -> None:
        (memory,) = pieces
        memoryview(memory).cast("B")[:] = self.data
        self.n_direct += 1
        if self.fails:
            raise BadRecord("its bytes are others")


def test_bytes_of_a_file_go_straight_into_a_slab(staging):
    """A record that turns out to be bad leaves nothing behind."""
    target = target_of(64, staging)
    good, bad, last = (rows_of(16, seed) for seed in range(3))
    sources = [Bytes(good), Bytes(bad, fails=True), Bytes(last)]
    arrays = [FileArray("F32", (1, 2, 16, 8), source) for source in sources]
    add(staging, (target, 0, arrays[0]))
    with pytest.raises(BadRecord):
        add(staging, (target, 16, arrays[1]))
    staging.discard()
    add(staging, (target, 32, arrays[2]), (target, 48, arrays[2].rows(0, 8)))
    copy_all(staging)
    assert [source.n_direct for source in sources] == [1, 1, 1]
    found = np.asarray(target.array)
    assert np.array_equal(found[:, :, :16], good.words)
    assert not found[:, :, 16:32].any()
    assert np.array_equal(found[:, :, 32:48], last.words)
    assert np.array_equal(found[:, :, 48:56], last.words[:, :, :8])


@pytest.mark.parametrize(
    ("architecture", "n_tokens"), [("llama", 900), *((name, 700) for name in CACHE_KINDS)]
)
def test_every_kind_of_cache_is_put_together_the_same(architecture, n_tokens, tiny_model, pool):
    """From records in slabs, in order and not, to their end and to the middle of one."""
    model, tokens = tiny_model(architecture), prompt_of(n_tokens)
    caches = prefill(model, kv.make_caches(model), tokens, 64)
    layout = kv.layout_of(caches)
    cut = records_from(tokens, cut_blocks(caches, n_tokens))
    offloaded = offload_blocks(pool, caches, n_tokens, range(-(-n_tokens // 256)), with_state=True)
    in_slabs = records_from(tokens, offloaded)
    is_rows_only = all(record.header.part is Part.DELTA for record in cut)
    n_restored = 650 if is_rows_only else n_tokens
    wanted = assembled(layout, n_restored, cut, None)
    for records in (cut, in_slabs, in_slabs[::-1]):
        found = assembled(layout, n_restored, records, pool)
        for a, b in zip(wanted, found, strict=True):
            for left, right in zip(kv.encode(a).arrays(), kv.encode(b).arrays(), strict=True):
                assert mx.array_equal(left, right)


@pytest.mark.parametrize("n_restored", [1024, 1000])
def test_blocks_come_back_without_work_for_each_tensor(n_restored, tiny_model, pool, monkeypatch):
    """Neither keeping nor restoring them makes an object for a tensor; reading their bytes does."""
    model, tokens = tiny_model("llama"), prompt_of(1024)
    caches = prefill(model, kv.make_caches(model), tokens, 128)
    made = []

    def counted(*arguments):
        made.append(SlabArray(*arguments))
        return made[-1]

    monkeypatch.setattr(slices, "SlabArray", counted)
    memory = MemoryTier(1 << 30)
    records = records_from(tokens, offload_blocks(pool, caches, 1024, range(4), with_state=False))
    assembly = kv.Assembly(kv.layout_of(caches), n_restored, pool)
    for record in records:
        assert memory.put(record).stored
        use = lambda view: assembly.add(block_of(view))  # noqa: E731
        assert memory.visit(record.header.key, Part.DELTA, use, ReadBuffer())
    for wanted, found in zip(caches, assembly.finish(), strict=True):
        assert mx.array_equal(wanted.keys[..., :n_restored, :], found.keys[..., :n_restored, :])
        assert not found.keys[..., n_restored:, :].any()
    assert not made
    encode_record(records[0])
    assert len(made) == len(records[0].tensors)
    memory.close()


def test_blocks_of_several_slices_share_one_plan(tiny_model, pool):
    model, tokens = tiny_model("llama"), prompt_of(1024)
    caches = prefill(model, kv.make_caches(model), tokens, 128)
    numbers = (range(1), range(1, 2), range(2, 4))
    cuts = [offload_blocks(pool, caches, 1024, some, with_state=False) for some in numbers]
    plans = {block.delta.plan for blocks in cuts for block in blocks}
    assert len(plans) == 1


@pytest.mark.parametrize("wrong", ["a tensor less", "another shape", "another dtype"])
def test_a_block_in_a_slab_is_checked(wrong, tiny_model, pool):
    model, tokens = tiny_model("llama"), prompt_of(512)
    caches = prefill(model, kv.make_caches(model), tokens, 128)
    layout = kv.layout_of(caches)
    if wrong == "a tensor less":
        (block, *_) = offload_blocks(pool, caches[:1], 512, range(2), with_state=False)
    else:
        (block, *_) = offload_blocks(pool, caches, 512, range(2), with_state=False)
        changed = {"shape": (1, 3, None, 16)} if "shape" in wrong else {"dtype": mx.float16}
        keys = replace(layout.layers[-1].tensors["keys"], **changed)
        last = replace(layout.layers[-1], tensors={**layout.layers[-1].tensors, "keys": keys})
        layout = replace(layout, layers=(*layout.layers[:-1], last))
    with pytest.raises((CorruptBlock, CacheMismatch)):
        kv.Assembly(layout, 512, pool).add(block)


def offloaded(model, n_tokens, pool, seed=0):
    """Caches of a prompt, and all of their blocks, in slabs."""
    caches = prefill(model, kv.make_caches(model), prompt_of(n_tokens, seed), 128)
    numbers = range(-(-n_tokens // 256))
    return caches, list(offload_blocks(pool, caches, n_tokens, numbers, with_state=True))


@pytest.mark.parametrize("architecture", ["gemma3_text", "falcon_h1"])
def test_a_block_in_slabs_is_taken_with_its_windows_and_states(architecture, tiny_model, pool):
    caches, blocks = offloaded(tiny_model(architecture), 300, pool)
    assembly = kv.Assembly(kv.layout_of(caches), 300, pool)
    for block in blocks:
        assembly.add(block)
    for wanted, found in zip(caches, assembly.finish(), strict=True):
        pairs = zip(kv.encode(wanted).arrays(), kv.encode(found).arrays(), strict=True)
        assert all(mx.array_equal(left, right) for left, right in pairs)


def test_a_block_in_a_slab_that_is_not_needed_is_left_out(tiny_model, pool):
    """A second one of the same tokens, one behind the end, and rows where no layer has any."""
    (caches, own), (_, others) = (offloaded(tiny_model("llama"), 512, pool, n) for n in (0, 1))
    assembly = kv.Assembly(kv.layout_of(caches), 200, pool)
    for block in (own[0], others[0], own[1]):
        assembly.add(block)
    for wanted, found in zip(caches, assembly.finish(), strict=True):
        assert mx.array_equal(wanted.keys[..., :200, :], found.keys[..., :200, :])
    states = tiny_model("mamba2")
    assembly = kv.Assembly(kv.probe(states, kv.make_caches(states)), 256, pool)
    assembly.add(own[0])
    with pytest.raises(CorruptBlock, match="no state as of token 256"):
        assembly.finish()


@pytest.mark.parametrize(
    ("architecture", "part"), [("llama", Part.DELTA), ("gemma3_text", Part.WINDOW)]
)
def test_a_bad_copy_of_a_block_leaves_nothing_filled(architecture, part, tiny_model, pool):
    """The intact copy that is read after it fills all layers, also those before the bad one."""
    model, tokens = tiny_model(architecture), prompt_of(512)
    caches = prefill(model, kv.make_caches(model), tokens, 64)
    layout = kv.layout_of(caches)
    records = records_from(tokens, cut_blocks(caches, 512))
    wanted = assembled(layout, 512, records, None)
    assembly = kv.Assembly(layout, 512, pool)
    for record in records:
        if record.header.part is part:
            with pytest.raises(BadRecord):
                assembly.add(with_bad_end(block_of(record)))
        assembly.add(block_of(record))
    for a, b in zip(wanted, assembly.finish(), strict=True):
        for left, right in zip(kv.encode(a).arrays(), kv.encode(b).arrays(), strict=True):
            assert mx.array_equal(left, right)


class Damaged(HostArray):
    """Its file has other bytes than it had."""

    @property
    def words(self):
        raise BadRecord("its bytes are others")


def with_bad_end(block):
    """The same block, where the last tensor of its rows is damaged."""

    def damaged(tensors):
        last = list(tensors)[-1:]
        return {**tensors, **{name: Damaged(tensors[name].words, mx.float32) for name in last}}

    return replace(block, delta=damaged(block.delta), window=damaged(block.window))


def records_from(tokens, blocks):
    pairs = zip(chain(NAMESPACE, tokens), blocks, strict=True)
    return [record for ref, block in pairs for record in records_of(NAMESPACE, ref, block)]


def assembled(layout, n_tokens, records, pool):
    assembly = kv.Assembly(layout, n_tokens, pool)
    for record in records:
        assembly.add(block_of(record))
        assembly.advance(is_complete=False)
    return assembly.finish()

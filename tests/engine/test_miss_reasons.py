"""Every reason of a miss, each provoked: the receipt names what has happened and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields, replace
from typing import get_args

import pytest

from keepwarm.cache.store import Budgets
from keepwarm.errors import Cancelled
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import Part, encode_record, open_record, read_record
from keepwarm.text.request import Miss, MissCause, Progress
from tests.kit.engines import FixedRates, ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

ON_DISK = Budgets(memory_bytes=0, min_free_disk_bytes=0)
N = 600
STATES = ["falcon_h1", "mamba2"]


class SlowDisk(FixedRates):
    """Loading takes far longer than computing."""

    def __init__(self) -> None:
        super().__init__()
        self.load_bytes_per_s = 1.0


def failed_restores(engine):
    return {why: n for why, n in engine.stats().failed_restores.items() if n}


def flip(path):
    """Change the last byte, which belongs to a row."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewritten(path, change):
    """The record with other tensors, and digests that match them."""
    with path.open("rb") as file:
        record = read_record(file, open_record(file, path.stat().st_size))
    path.write_bytes(b"".join(encode_record(change(record))))


def with_extra_head(record):
    return replace(record, tensors=tuple(map(one_head_more, record.tensors)))


def one_head_more(tensor):
    batch, heads, rows, width = tensor.shape
    data = bytes(tensor.data) + bytes(tensor.n_bytes // heads)
    return tensor._replace(shape=(batch, heads + 1, rows, width), data=memoryview(data))


def without_rows(record):
    return replace(record, tensors=())


def of_no_dtype(record):
    halves = (
        t._replace(dtype="F64", shape=(*t.shape[:-1], t.shape[-1] // 2)) for t in record.tensors
    )
    return replace(record, tensors=tuple(halves))


def without_window(record):
    return replace(record, header=replace(record.header, extra={"w_rows": 600 - 512}), tensors=())


class Broken:
    """A reader that fails with an unexpected exception."""

    slabs = None

    def start(self, *read):
        raise ValueError("cannot broadcast")


def restorer_of(engine):
    return engine.lane_of().restorer


def record_of(engine, prompt):
    """The file of the second block."""
    key = restorer_of(engine).plan(prompt).point.reads[1].key
    return engine.store.on_disk.disk.records.path_of(key, Part.DELTA)


def asked(engine, prompt, **wishes):
    receipt = engine.submit(ask(prompt, explain=True, **wishes)).result().receipt
    engine.wait_until_saved()
    engine.call(engine.live.clear).result()
    return receipt


def nothing(engine, prompt):
    """It is there, as it was stored."""


def evict(engine, prompt):
    disk = engine.store.on_disk.disk
    disk.delete_all([block.key for block in disk.walk()])


def vanish(engine, prompt):
    record_of(engine, prompt).unlink()


def damage(engine, prompt):
    flip(record_of(engine, prompt))


def no_permission(engine, prompt):
    path = record_of(engine, prompt)
    path.unlink()
    path.symlink_to(path)  # a loop, which not even root can read


def other_layout(engine, prompt):
    rewritten(record_of(engine, prompt), with_extra_head)


def slow_disk(engine, prompt):
    restorer_of(engine).rates = SlowDisk()


def broken_reader(engine, prompt):
    restorer_of(engine).reader = Broken()


@pytest.mark.parametrize(
    ("happens", "reason", "n_reused", "counted", "told"),
    [
        (nothing, None, N - 1, None, ""),
        (evict, "evicted", 0, None, ""),
        (vanish, "evicted", 256, "missing", ""),
        (damage, "damaged", 256, "damaged", "is bad and was quarantined"),
        (no_permission, "unreadable", 256, "unreadable", ""),
        (other_layout, "refused layout", 256, "layout", ""),
        (slow_disk, "not worth loading", 0, None, ""),
        (broken_reader, "failed", 0, "error", "a restore failed"),
    ],
)
def test_what_happened_to_a_stored_prompt_is_the_reason(
    happens, reason, n_reused, counted, told, models, tmp_path, caplog
):
    """The same prompt again, after something befell its blocks; a failed restore is counted and
    logged, and fails no request."""
    prompt = prompt_of(N)
    with engine_on(models.of("llama"), tmp_path, budgets=ON_DISK) as engine:
        assert asked(engine, prompt).miss.reason == "new"
        happens(engine, prompt)
        receipt = asked(engine, prompt)
        stats = engine.stats()
        assert failed_restores(engine) == ({counted: 1} if counted else {})
    assert stats.counters["failed"] == 0
    assert told in caplog.text
    assert receipt.cached_tokens == n_reused
    assert (receipt.miss and receipt.miss.reason) == reason
    if reason is not None:
        assert (receipt.miss.position, receipt.miss.nearest) == (n_reused, N)


def test_a_prompt_with_many_bad_records_is_one_failure(models, tmp_path):
    """Each plan without the last bad one meets the next."""
    prompt = prompt_of(N)
    with engine_on(models.of("llama"), tmp_path, budgets=ON_DISK) as engine:
        asked(engine, prompt)
        for path in (tmp_path / "store" / "blocks").glob("*/*.safetensors"):
            flip(path)
        assert asked(engine, prompt).miss.reason == "damaged"
        assert failed_restores(engine) == {"damaged": 1}
        assert engine.stats().tiers["disk"].quarantined > 1, "the control"


def test_a_policy_that_does_not_read_is_the_reason(models, tmp_path):
    with engine_on(models.of("llama"), tmp_path) as engine:
        asked(engine, prompt_of(N))
        assert asked(engine, prompt_of(N), policy=Policy.NO_STORE).miss.reason == "disabled"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *STATES])
def test_a_divergence_is_one_on_every_kind_of_model(architecture, models, tmp_path):
    """A model with states goes back to a checkpoint before it: nothing was evicted."""
    before, other = prompt_of(N), prompt_of(N, seed=7)
    with engine_on(models.of(architecture), tmp_path) as engine:
        asked(engine, before)
        miss = asked(engine, [*before[:300], *other[:200]]).miss
        assert (miss.reason, miss.nearest) == ("diverged", 300)
        evict(engine, before)
        engine.clear()
        assert asked(engine, before).miss.reason == "evicted", "the control"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *STATES])
def test_a_divergence_is_known_after_a_restart(architecture, models, tmp_path):
    """From what is stored."""
    before, other = prompt_of(N), prompt_of(N, seed=7)
    model = models.of(architecture)
    with engine_on(model, tmp_path) as engine:
        asked(engine, before)
    with engine_on(model, tmp_path) as engine:
        miss = asked(engine, [*before[:300], *other[:400]]).miss
        assert (miss.reason, miss.nearest) == ("diverged", 300)
        assert asked(engine, [*other[:300], 1, 2]).miss.nearest == 0, "the control"


@pytest.mark.parametrize("restart", [False, True])
def test_a_missing_checkpoint_is_the_reason_where_it_would_spare_most(restart, models, tmp_path):
    before, other = prompt_of(N), prompt_of(N, seed=7)
    prompt, model = [*before[:550], *other[:20]], models.of("falcon_h1")
    with ExitStack() as stack:
        engine = stack.enter_context(engine_on(model, tmp_path))
        asked(engine, before)
        if restart:
            stack.close()
            engine = stack.enter_context(engine_on(model, tmp_path))
        miss = asked(engine, prompt).miss
        assert (miss.reason, miss.nearest) == ("no checkpoint", 550)
        assert miss.position < 512
        assert asked(engine, [*before[:550], *other[20:40]]).cached_tokens == 550, "it is kept now"


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", *STATES])
def test_what_a_cancelled_prefill_left_was_not_computed(architecture, models, tmp_path):
    """Nothing was evicted, and no disk is too small; nor is it shown as computed twice."""
    prompt = prompt_of(N)
    with engine_on(models.of(architecture), tmp_path) as engine:
        engine._scheduler.slice_sizer.max_slice = 16
        answer = engine.submit(ask(prompt))
        done = next(event.done for event in answer if isinstance(event, Progress))
        answer.cancel()
        with pytest.raises(Cancelled):
            answer.result()
        n_computed = engine.ledger.records()[-1].computed_tokens
        assert done <= n_computed < N - 1
        receipt = asked(engine, prompt)
        assert (receipt.miss.reason, receipt.miss.nearest) == ("not computed", n_computed)
        assert receipt.cached_tokens == n_computed
        assert engine.ledger.misses() == []
        evict(engine, prompt)
        engine.clear()
        assert asked(engine, prompt).miss.reason == "evicted", "the control"


def test_no_reason_is_left_out():
    """A new reason needs a test above; `compacted` has its own in `tests/session`."""
    here = {"new", "diverged", "evicted", "damaged", "unreadable", "refused layout", "failed"}
    here |= {"not computed", "no checkpoint", "not worth loading", "disabled", "compacted"}
    assert here == set(get_args(MissCause))
    assert "reason" in {field.name for field in fields(Miss)}


def test_roots_are_used_when_their_leaves_are(models, tmp_path):
    """From live caches too, where no block is read."""
    prompt = prompt_of(N)
    with engine_on(models.of("llama"), tmp_path) as engine:
        disk = engine.store.on_disk.disk
        engine.submit(ask(prompt)).result()
        for from_live in (True, False):
            engine.wait_until_saved()
            if not from_live:
                engine.call(engine.live.clear).result()
            before = roots(disk)
            reused = engine.submit(ask(prompt)).result().receipt.reused
            assert ("live" in reused) is from_live
            engine.wait_until_saved()
            after = roots(disk)
            assert len(before) == len(after) == 2
            assert all(after[key] > before[key] for key in before)


def roots(disk):
    """When the blocks before the last were used."""
    return {block.key: block.used for block in disk.walk() if block.number < N // 256}


@pytest.mark.parametrize(
    ("architecture", "part", "change"),
    [
        ("llama", "d", with_extra_head),
        ("llama", "d", of_no_dtype),
        ("gemma3_text", "w", without_window),
        ("qwen3_next", "s", without_rows),
    ],
)
def test_a_record_that_does_not_fit_is_replaced_when_it_is_computed(
    architecture, part, change, models, tmp_path
):
    """Its digests match, so that only the model can tell: once, not at every request."""
    prompt = prompt_of(601)
    with engine_on(models.of(architecture), tmp_path, budgets=ON_DISK) as engine:
        cold = engine.submit(ask(prompt, policy=Policy.DURABLE)).result()
        engine.call(engine.live.clear).result()
        restorer = engine.lane_of().restorer
        point = restorer.plan(prompt).point
        key = [read.key.hex() for read in point.reads if read.part == part][-1]
        rewritten(tmp_path / "store" / "blocks" / key[:2] / f"{key}.{part}.safetensors", change)
        n_reused = []
        for _ in range(2):
            warm = engine.submit(ask(prompt, policy=Policy.DURABLE)).result()
            assert tokens_of(warm.choices[0]) == tokens_of(cold.choices[0])
            n_reused.append(warm.receipt.cached_tokens)
            engine.call(engine.live.clear).result()
        assert engine.stats().tiers["disk"].quarantined in (1, 2)  # or all records of the block
        assert failed_restores(engine) == {"layout": 1}
    assert n_reused[0] < point.n_tokens
    assert n_reused[1] == point.n_tokens

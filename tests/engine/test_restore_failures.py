"""A failed restore is counted and logged with its reason; the request is still answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepwarm.cache.store import Budgets
from keepwarm.prefix.policy import Policy
from keepwarm.records.record import encode_record, open_record, read_record
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

ON_DISK = Budgets(memory_bytes=0, min_free_disk_bytes=0)


def flip(path):
    """Change the last byte, which belongs to a row."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def failed_restores(stats):
    return {reason: n for reason, n in stats.failed_restores.items() if n}


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
        assert failed_restores(engine.stats()) == {"layout": 1}
    assert n_reused[0] < point.n_tokens
    assert n_reused[1] == point.n_tokens


class Broken:
    """A reader that fails with an unexpected exception."""

    slabs = None

    def start(self, *read):
        raise ValueError("cannot broadcast")

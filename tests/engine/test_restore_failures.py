"""A failed restore is counted and logged with its reason; the request is still answered."""

from __future__ import annotations

import logging

from keepwarm.cache.policy import Policy
from keepwarm.cache.store import Budgets
from tests.kit.engines import ask, engine_on, tokens_of
from tests.kit.runs import prompt_of

ON_DISK = Budgets(memory_bytes=0, min_free_disk_bytes=0)


def flip(path):
    """Change the last byte, which belongs to a row."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_failed_restore_is_counted_told_and_a_miss(models, tmp_path, caplog):
    """S0-03: never in silence; what the blocks before the bad one hold is still of use."""
    prompt = prompt_of(600)
    with engine_on(models.of("llama"), tmp_path, budgets=ON_DISK) as engine:
        manager = engine.call(lambda: engine._lanes.get(engine.config.kv, "")).result().manager
        cold = engine.submit(ask(prompt, policy=Policy.DURABLE)).result()
        engine.call(engine.live.clear).result()
        second = manager.plan(prompt).point.reads[1].key.hex()
        flip(tmp_path / "store" / "blocks" / second[:2] / f"{second}.d.safetensors")
        with caplog.at_level(logging.WARNING, "keepwarm"):
            warm = engine.submit(ask(prompt)).result()
        stats = engine.stats()
    assert manager.restore_failures == 1
    assert stats.tiers["disk"].quarantined == 1
    assert stats.counters["failed"] == 0
    assert "is bad and was quarantined" in caplog.text
    assert "digest" in caplog.text
    assert warm.receipt.reused == {"disk": 256}
    assert tokens_of(warm.choices[0]) == tokens_of(cold.choices[0])


class Broken:
    """A reader that fails with an unexpected exception."""

    staging = None

    def start(self, reads, prepare, in_background=False):
        raise ValueError("cannot broadcast")


def test_a_failure_of_any_kind_is_counted_told_and_a_miss(models, tmp_path, caplog):
    """S0-03."""
    prompt = prompt_of(300)
    with engine_on(models.of("llama"), tmp_path, budgets=ON_DISK) as engine:
        manager = engine.call(lambda: engine._lanes.get(engine.config.kv, "")).result().manager
        cold = engine.submit(ask(prompt, policy=Policy.DURABLE)).result()
        engine.call(engine.live.clear).result()
        manager.reader = Broken()
        with caplog.at_level(logging.ERROR, "keepwarm"):
            warm = engine.submit(ask(prompt)).result()
    assert manager.restore_failures == 1
    assert "a restore failed" in caplog.text
    assert "cannot broadcast" in caplog.text
    assert warm.receipt.reused == {}
    assert tokens_of(warm.choices[0]) == tokens_of(cold.choices[0])

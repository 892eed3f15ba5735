"""The engine's default KV options, and the lane that a request runs in."""

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from keepwarm import config
from keepwarm.cache.store import Budgets
from keepwarm.device.memory import MemoryConfig
from keepwarm.engine.admission import EngineConfig
from keepwarm.engine.engine import Engine
from keepwarm.engine.lane import MAX_CHOICES, Lane
from keepwarm.errors import BadInput, BadModelFile, UnsupportedCache
from keepwarm.models.load import load
from keepwarm.text.request import KVOptions, Request
from tests.kit.checkpoints import write_checkpoint
from tests.kit.engines import Exam, ask, engine_on
from tests.kit.runs import prompt_of

EIGHT = KVOptions(kv_bits=8, kv_group_size=32)


def test_request_that_names_no_options_has_those_of_the_engine_everywhere(models, tmp_path):
    prompt, four = prompt_of(300), KVOptions(kv_bits=4)
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        engine.submit(ask(prompt, 4)).result()
        assert engine.lookup(Request(prompt=[*prompt, 1])).warm == {"live": 300}
        assert engine.lookup(Request(prompt=prompt, kv=four)).warm == {}
        assert engine.prepare(ask([1, 2])).request.kv == EIGHT
        assert engine.prepare(ask([1, 2], kv=four)).request.kv == four
        assert engine.count_tokens(Request(prompt=[1, 2, 3])) == 3
        assert (KVOptions(), "") not in engine._lanes._made


class CountingLanes(Engine):
    """Counts how often a request's lane is looked up."""

    n_lookups = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        lane_for = self._preparation.lane_for

        def count(request: Request) -> Lane:
            self.n_lookups += 1
            return lane_for(request)

        self._preparation.lane_for = count


def test_the_lane_is_looked_up_once_a_request(models, tmp_path):
    long, start = prompt_of(300), 200
    options = KVOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=start)
    with engine_on(models.of("llama"), tmp_path, engine_class=CountingLanes) as engine:
        for n_tokens, is_exact in ((start - 1, True), (start, False), (300, False)):
            before = engine.n_lookups
            receipt = engine.submit(ask(long[:n_tokens], kv=options)).result().receipt
            assert (engine.n_lookups - before, receipt.exact) == (1, is_exact)


# Settings for the whole engine.


def settings(home, **values):
    return config.load({"KEEPWARM_HOME": str(home)}, **values)


def test_settings_are_the_engines_options(tmp_path):
    values = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 100}
    assert EngineConfig.of(settings(tmp_path)).kv == KVOptions()
    assert EngineConfig.of(settings(tmp_path, **values)).kv == KVOptions(**values)
    assert EngineConfig.of(settings(tmp_path, max_kv_size=64)).kv == KVOptions(max_kv_size=64)
    assert EngineConfig.of(settings(tmp_path)).memory is None


def test_a_request_may_ask_for_exact_keys_and_values(models, tmp_path):
    prompt = prompt_of(40)
    with engine_on(models.of("llama"), tmp_path, kv=EIGHT) as engine:
        assert engine.submit(ask(prompt)).result().receipt.inexact == ("quantised",)
        exam, exact = Exam(models.module("llama")), engine.submit(ask(prompt, exact=True)).result()
        assert exact.receipt.inexact == ()
        assert exact.receipt.reused == {}, "blocks of one choice are not found with the other"
        exam.add(prompt, exact.choices[0])
        assert exam.check()


def test_a_bounded_cache_is_exact_until_it_drops_a_row(models, tmp_path):
    """As the receipt has it before and after the answer."""
    with engine_on(models.of("llama"), tmp_path, kv=KVOptions(max_kv_size=32)) as engine:
        for n_prompt, n_answer, planned, ended in (
            (10, 4, (), ()),
            (26, 6, (), ()),
            (26, 7, (), ("bounded",)),
            (40, 1, ("bounded",), ("bounded",)),
        ):
            events = list(engine.submit(ask(prompt_of(n_prompt), n_answer)))
            assert events[0].receipt.inexact == planned
            assert events[-1].receipt.inexact == ended, (n_prompt, n_answer)


def test_where_no_layer_is_bounded_nothing_is_dropped(models, tmp_path):
    """A model of states keeps no rows, whatever is asked."""
    with engine_on(models.of("mamba2"), tmp_path, kv=KVOptions(max_kv_size=32)) as engine:
        assert engine.submit(ask(prompt_of(80))).result().receipt.exact


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KVOptions(quantized_kv_start=-1), "quantized_kv_start is -1"),
        (lambda: EngineConfig(max_queue=0), "max_queue is 0"),
        (lambda: EngineConfig(audit_share=1.5), "audit_share is 1.5"),
        (lambda: Request(timeout_s=0), "timeout_s is 0"),
        (lambda: Request(timeout_s=math.nan), "timeout_s is nan"),
        (lambda: Request(exact=True, kv=EIGHT), "exact and kv cannot be combined"),
        (lambda: Budgets(memory_bytes=-1), "memory_bytes is -1"),
        (lambda: Budgets(disk_writes_per_day=0), "disk_writes_per_day is 0"),
        (lambda: MemoryConfig(1, 1, -1, 1, 1), "live_bytes is -1"),
    ],
)
def test_senseless_values_are_refused_in_the_library(make, says):
    with pytest.raises(BadInput, match=says):
        make()


@pytest.mark.parametrize("kv", [KVOptions(kv_bits=3), KVOptions(8, 8), KVOptions(max_kv_size=0)])
def test_an_engine_refuses_options_when_it_is_made(models, tmp_path, kv):
    """Not at every request."""
    with pytest.raises(BadInput, match=r"kv_bits|max_kv_size"):
        Engine(models.of("llama"), None, EngineConfig(kv=kv), settings=settings(tmp_path))


def test_the_context_is_a_setting(tmp_path):
    """Of a prompt and its answer; never longer than the model's own."""
    path = str(write_checkpoint(tmp_path / "model", n_context=100))
    short = load(path, settings(tmp_path, context=64))
    assert short.n_context == 64
    assert load(path, settings(tmp_path, context=101)).n_context == 100


def test_a_lane_of_the_default_options_needs_no_run_of_the_model(models, tmp_path):
    """The engine has run it once; other options are tried out when they are asked for."""
    model = models.of("llama")
    with engine_on(model, tmp_path) as engine:
        n_runs = len(model.module.shapes)
        assert engine.lane_of("first").restorer.layout == engine.lane_of("second").restorer.layout
        assert len(model.module.shapes) == n_runs
        engine.prepare(ask([1, 2], kv=KVOptions(max_kv_size=64)))
        assert len(model.module.shapes) == n_runs + 1


def test_lane_belongs_to_the_weights_that_were_loaded(tmp_path):
    """Whoever replaces their files meanwhile: what is computed is the old model's."""
    path, chosen = write_checkpoint(tmp_path / "model"), settings(tmp_path)
    with Engine(load(str(path), chosen), settings=chosen) as engine:
        first = engine.lane_of("first").identity
        write_checkpoint(path, seed=1)
        assert engine.lane_of("second").identity == replace(first, salt="second")
        bounded = engine.lane_of(kv=KVOptions(max_kv_size=64)).identity
    with Engine(load(str(path), chosen), settings=chosen) as engine:
        assert engine.lane_of("second").identity.weights != first.weights
        again = engine.lane_of(kv=KVOptions(max_kv_size=64)).identity
    assert replace(bounded, weights=again.weights) == again != bounded


@pytest.mark.parametrize("replaced", ["overwritten", "another directory"])
def test_engine_refuses_requests_if_its_files_were_replaced_before_the_first(replaced, tmp_path):
    """Nobody knows any more what their digests were."""
    path, chosen = tmp_path / "current", settings(tmp_path)
    path.symlink_to(write_checkpoint(tmp_path / "old"))
    with Engine(load(str(path), chosen), settings=chosen) as engine:
        if replaced == "overwritten":
            write_checkpoint(path, seed=1)
        else:
            path.unlink()
            path.symlink_to(write_checkpoint(tmp_path / "new", seed=1))
        with pytest.raises(BadModelFile, match="were replaced since it was loaded; load it again"):
            engine.submit(ask([1, 2]))


def test_a_new_link_or_mode_of_a_models_files_changes_nothing(tmp_path):
    """As of a backup, between a server's start and its first request."""
    path, chosen = write_checkpoint(tmp_path / "model"), settings(tmp_path)
    with Engine(load(str(path), chosen), settings=chosen) as engine:
        for file in path.iterdir():
            file.chmod(0o640)
            (tmp_path / file.name).hardlink_to(file)
        assert engine.submit(ask([1, 2])).result().usage.completion_tokens


def test_a_tenant_may_choose_a_bounded_number_of_kv_options(models, tmp_path):
    """Other tenants, and those chosen before, are as before."""
    with engine_on(models.of("llama"), tmp_path) as engine:
        chosen = [KVOptions(max_kv_size=size) for size in range(32, 32 + MAX_CHOICES)]
        for each in chosen:
            engine.prepare(ask([1, 2], kv=each, tenant="other"))
        with pytest.raises(BadInput, match="64 different kv options"):
            engine.prepare(ask([1, 2], kv=KVOptions(max_kv_size=8), tenant="other"))
        engine.prepare(ask([1, 2], kv=chosen[0], tenant="other"))
        engine.prepare(ask([1, 2], kv=KVOptions(max_kv_size=8), tenant="mine"))


def test_engine_whose_probe_fails_closes_the_store_that_it_opened(models, tmp_path, monkeypatch):
    def fail(*given: Any) -> None:
        raise UnsupportedCache("a fault")

    def writers() -> list[str]:
        return [each.name for each in threading.enumerate() if "keepwarm-writer" in each.name]

    monkeypatch.setattr("keepwarm.engine.engine.run_probe", fail)
    before = writers()
    with pytest.raises(UnsupportedCache):
        Engine(models.of("llama"), settings=config.load({"KEEPWARM_HOME": str(tmp_path)}))
    assert writers() == before
